"""Scorer by the lengths of keys and values, as cheap leverage scores (CurDKV).

Sengupta et al., "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition" (2025),
arXiv:2509.15038. The rows of keys and values that a CUR decomposition would pick have a high
leverage score, for which the squared length of a row stands. The paper's product of both is the
default. Follows the code in NVIDIA/kvpress: lengths are shares of those of a window of `window`
neighboring entries, counted from the head's first, and scores are shares of the head's sum, so that
heads compare. There 4 sinks have the score 1; here they are protected. The paper's random
projection is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers.base import Scorer


class Leverages(Enum):
    """Rows whose squared lengths count."""

    PRODUCT = "product"
    MEAN = "mean"
    KEYS = "keys"
    VALUES = "values"


@dataclass(frozen=True)
class CurDKV(Scorer):
    """Squared length of key and value, each as a share of its window.

    Args:
        window: entries whose lengths are compared; 1 compares none and leaves all alike.
        sinks: tokens at the start of the sequence that always stay.
        by: `product` or `mean` of the shares of key and value, or one of them.
    """

    window: int = 16
    sinks: int = 4
    by: Leverages = Leverages.PRODUCT

    def __post_init__(self) -> None:
        require(self.window >= 1, "curdkv.window", "at least 1 entry", self.window)
        require(self.sinks >= 0, "curdkv.sinks", "0 or more", self.sinks)

    def protected_tokens(self) -> ProtectedTokens:
        """The sinks."""
        return ProtectedTokens(self.sinks)

    def score(self, observation: Observation) -> Packed:
        return torch.cat(
            [self._of_head(observation, head) for head in range(observation.layer.kv_heads)]
        )

    def _of_head(self, observation: Observation, head: int) -> Float[Tensor, " S"]:
        keys = self._shares(observation.entries.head_keys(head))
        values = self._shares(observation.entries.head_values(head))
        match self.by:
            case Leverages.PRODUCT:
                scores = keys * values
            case Leverages.MEAN:
                scores = (keys + values) / 2
            case Leverages.KEYS:
                scores = keys
            case Leverages.VALUES:
                scores = values
        is_sink = observation.entries.head_positions(head) < self.sinks
        return _share(scores, 0).masked_fill(is_sink, torch.inf)

    def _shares(self, rows: Float[Tensor, "S D"]) -> Float[Tensor, " S"]:
        """Squared length of each row as a share of its window's sum."""
        squares = rows.float().square().sum(-1)
        windows = pad(squares, (0, -len(squares) % self.window)).view(-1, self.window)
        return _share(windows, 1).flatten()[: len(squares)]


def _share(numbers: Float[Tensor, "*S"], dim: int) -> Float[Tensor, "*S"]:
    """Numbers over their sum along a dimension; 0 where that is 0."""
    return numbers / numbers.sum(dim, keepdim=True).clamp_min(torch.finfo(numbers.dtype).tiny)


Part = CurDKV
