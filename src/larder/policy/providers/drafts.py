"""Provider of drafts: the tokens that the model would generate next, decoded greedily."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from larder.policy.providers.base import DraftProvider


class Drafts(DraftProvider):
    """Most likely token behind each prompt."""

    def next_tokens(self, logits: Float[Tensor, "N V"]) -> list[int]:
        return logits.argmax(-1).tolist()  # pyright: ignore


Part = Drafts
