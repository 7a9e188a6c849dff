"""Scorer by surprise of a token when it was read (SirLLM).

Yao et al., "SirLLM: Streaming Infinite Retentive LLM" (2024), arXiv:2405.12528, section 3: what the
paper calls token entropy, -log p of a token given all before it. The model has seen what it was
given when the token was read: of a context that was cut before, what was left. The first token has
nothing before it, and is as surprising as the most surprising one that was read with it.

Stored values fade by `decay` with every turn of a dialogue there; a cache knows no turns, so here
they fade with every `turn` tokens. The paper uses cache positions, which the storage
`compact` does. All heads of all layers agree, so `uniform` is the budget that fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class Novelty(Scorer):
    """Surprise of a token when it was read, times decay ** (turns since then).

    Args:
        decay: what is left of a value after each turn, in (0, 1]. The paper's tasks take 0.7 to 1;
            1 forgets nothing.
        turn: tokens of a turn; what is left over since the last whole turn does not count.
    """

    decay: float = 1.0
    turn: int = 64
    needs = frozenset({"surprise"})

    def __post_init__(self) -> None:
        require(0 < self.decay <= 1, "novelty.decay", "in (0, 1]", self.decay)
        require(self.turn >= 1, "novelty.turn", "at least 1 token", self.turn)

    def score(self, observation: Observation) -> Packed:
        ages = observation.length - 1 - observation.entries.packed_positions()
        turns = torch.div(ages, self.turn, rounding_mode="floor")
        return observation.entries.column("surprise") * self.decay**turns


Part = Novelty
