"""Provider of learned tokens that look at a context as the model's answer will (LookaheadKV).

Ahn et al., "LookaheadKV: Fast and Accurate KV Cache Eviction by Glimpsing into the Future without
Generation" (2026), arXiv:2603.10899. 32 learned tokens are read behind the context; all linear
layers have low-rank updates (rank 8, alpha 32) for these tokens alone, so that entries of the
context do not change.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from larder.core.spec import LayerSpec
from larder.policy.providers.base import SoftPromptProvider

SOFT_TOKENS, ALPHA = 32, 32.0
EMBEDDINGS = "embeddings"  # tensor of the learned tokens, beside those of the first layer
DOWN, UP = ".down", ".up"  # ends of the names of both factors of an update


class LookaheadTokens(SoftPromptProvider):
    """Learned tokens and low-rank updates `<linear layer>.down` [rank, in], `.up` [out, rank]."""

    @property
    def tokens(self) -> int:
        return SOFT_TOKENS

    def scale(self, rank: int) -> float:
        return ALPHA / rank

    def shapes(
        self, layer: LayerSpec, width: int, tensors: Mapping[str, Tensor]
    ) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a layer; sizes of its linear layers are read from `tensors`."""
        own = {name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)}
        found = dict[str, tuple[int, ...]]()
        if EMBEDDINGS in tensors:
            found[EMBEDDINGS] = (SOFT_TOKENS, width)
        for name in own:
            down, up = tensors[f"{name}{DOWN}"], tensors.get(f"{name}{UP}")
            found[f"{name}{DOWN}"] = (len(down), *down.shape[1:2])
            found[f"{name}{UP}"] = (0 if up is None else len(up), len(down))
        return found


Part = LookaheadTokens
