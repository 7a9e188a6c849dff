"""Choosing the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Args:
        temperature: 0 takes the most likely token; above, logits are divided by it.
        top_k: draw among the k most likely; 0 for all.
        top_p: draw among the most likely of these that together hold this share of what the k hold
            (the order of Hugging Face's generation: top-k first).
        seed: of the draw.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise BadParameter(
                f"temperature must be a finite number, 0 or more, got {self.temperature}."
            )
        if self.top_k < 0:
            raise BadParameter(f"top_k must be 0 (all) or more, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise BadParameter(f"top_p must be in (0, 1], got {self.top_p}.")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise BadParameter(f"seed must fit into 64 bits, got {self.seed}.")

    def generator(self) -> torch.Generator:
        """A fresh source of randomness for one answer."""
        return torch.Generator().manual_seed(self.seed)

    def choose(self, logits: Float[Tensor, " V"], source: torch.Generator) -> int:
        """The next token; equal logits go to the smaller id."""
        if self.temperature == 0:
            return int(logits.argmax())
        ranked, ids = torch.sort(logits.float().cpu(), descending=True, stable=True)
        ranked = ranked[: self.top_k or None].double()
        # The best is 0 before dividing: however small the temperature, nothing overflows upwards.
        shares = ((ranked - ranked[0]) / self.temperature).softmax(-1)
        before = shares.cumsum(-1) - shares
        return int(ids[torch.multinomial(shares * (before < self.top_p), 1, generator=source)])
