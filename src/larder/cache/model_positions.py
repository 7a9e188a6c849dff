"""Positions that a model's RoPE gives to tokens, where they differ from true positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.core.types import Positions, empty_tensor

MODEL_POSITIONS = "model_positions"  # name in a state


def _none() -> Tensor:
    return empty_tensor(torch.int64, 1, 0)


@dataclass(frozen=True)
class ModelPositions:
    """Positions of the tokens of a sequence in A numbers each, 3 under M-RoPE.

    Args:
        known: of the first N tokens. Later tokens count on from the largest number, in steps of
            one; with N = 0 that is their true position.
    """

    known: Int64[Tensor, "A N"] = field(default_factory=_none)

    @property
    def are_true(self) -> bool:
        """True if every token is at its true position, in one number."""
        return not self.known.shape[1]

    @property
    def nbytes(self) -> int:
        return self.known.nbytes

    def at(self, positions: Positions, length: int) -> Int64[Tensor, "A Q"]:
        """Model positions of tokens.

        Args:
            positions: their true positions.
            length: tokens of the sequence in front of a text that is read behind it.
        """
        count = min(length, self.known.shape[1])
        if not count:
            return positions.long()[None].expand(self.known.shape[0], -1)
        known = self.known[:, :count].to(positions.device)
        later = known.max() + 1 - count + positions
        return torch.where(positions < count, known[:, positions.clamp(max=count - 1)], later)

    def extended(self, start: int, position_ids: Int64[Tensor, "A Q"]) -> ModelPositions:
        """Positions with those of consecutive tokens from true position `start` on."""
        position_ids = position_ids.long()
        positions = torch.arange(start, start + position_ids.shape[1], device=position_ids.device)
        axes = self if not self.are_true else ModelPositions(position_ids[:, :0])
        if torch.equal(axes.at(positions, start), position_ids):
            return self
        before = torch.arange(start, device=position_ids.device)
        return ModelPositions(torch.cat([axes.at(before, start), position_ids], 1))

    def truncated(self, length: int) -> ModelPositions:
        """Positions of the first `length` tokens."""
        if length >= self.known.shape[1]:
            return self
        return ModelPositions(self.known[:, :length])

    def state(self) -> dict[str, Tensor]:
        """Tensors to restore from, by name."""
        return {} if self.are_true else {MODEL_POSITIONS: self.known.clone()}

    @staticmethod
    def restore(state: Mapping[str, Tensor], device: torch.device) -> ModelPositions:
        """Restored positions on a tensor of their own."""
        if MODEL_POSITIONS not in state:
            return ModelPositions()
        return ModelPositions(state[MODEL_POSITIONS].to(device, copy=True))
