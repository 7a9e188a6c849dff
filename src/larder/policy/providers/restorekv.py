"""Provider of learned tokens whose entries stand for what is evicted (RestoreKV).

Baek, Shin, Kong, "RestoreKV: Recovering Full-Cache Behavior Under Aggressive Query-Agnostic KV
Cache Eviction" (2026), arXiv:2608.01247. 8 learned tokens are read behind the full cache; all
linear layers have low-rank updates (rank 8, alpha 16) in this pass alone.
"""

from __future__ import annotations

from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors, TensorShapes
from larder.policy.providers._soft_tokens import soft_token_shapes
from larder.policy.providers.base import SoftEntryProvider

RESTORE_TOKENS, ALPHA = 8, 16.0


class RestoreTokens(SoftEntryProvider):
    """Learned tokens and low-rank updates `<linear layer>.down` [rank, in], `.up` [out, rank]."""

    @property
    def tokens(self) -> int:
        return RESTORE_TOKENS

    def scale(self, rank: int) -> float:
        return ALPHA / rank

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return soft_token_shapes(RESTORE_TOKENS, width, tensors)


Part = RestoreTokens
