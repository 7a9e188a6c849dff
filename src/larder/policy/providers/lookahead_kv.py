"""Provider of learned tokens that look at a context as the model's answer will (LookaheadKV).

Ahn et al., "LookaheadKV: Fast and Accurate KV Cache Eviction by Glimpsing into the Future without
Generation" (2026), arXiv:2603.10899. 32 learned tokens are read behind the context; all linear
layers have low-rank updates (rank 8, alpha 32) for these tokens alone, so that entries of the
context do not change.
"""

from __future__ import annotations

from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors, TensorShapes
from larder.policy.providers._soft_tokens import soft_token_shapes
from larder.policy.providers.base import SoftPromptProvider

SOFT_TOKENS, ALPHA = 32, 32.0


class LookaheadTokens(SoftPromptProvider):
    """Learned tokens and low-rank updates `<linear layer>.down` [rank, in], `.up` [out, rank]."""

    @property
    def tokens(self) -> int:
        return SOFT_TOKENS

    def scale(self, rank: int) -> float:
        return ALPHA / rank

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        return soft_token_shapes(SOFT_TOKENS, width, tensors)


Part = LookaheadTokens
