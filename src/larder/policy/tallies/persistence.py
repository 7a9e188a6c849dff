"""Tally of the queries to which an entry was of no importance (Scissorhands).

Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache
Compression at Test Time" (2023), arXiv:2305.17118, algorithm 2: an entry is unimportant to a query
that gives it less than 1 / t, with t the tokens that the query can see. The paper counts over the
latest 400 queries; here older ones fade, each query taking 1 / 400 of the count away, so that no
history of weights is held. The weight is the mean over the query heads that share a kv head; the
paper has one kv head per query head. A tally takes no parameter.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.ops.column_statistics import GroupReduction
from larder.policy.tallies._attention_weights import QueryWeights, State, update_columns
from larder.policy.tallies.base import Tally

UNIMPORTANT = "unimportant"
HISTORY = 400  # queries


class PersistenceTally(Tally):
    """Column `unimportant`: queries that gave the entry less than an even share, fading."""

    columns = (UNIMPORTANT,)

    def update(self, observation: Observation) -> dict[str, Float[Tensor, " C"]]:
        return update_columns(observation, self.columns, GroupReduction.MEAN, _counted)


def _counted(state: State, votes: QueryWeights) -> State:
    """Count after some queries, from the count before them."""
    low = votes.sees & (votes.weights < 1 / (votes.times[:, None] + 1))
    ages = torch.arange(len(votes.times), device=low.device).flip(0)
    fading = (1 - 1 / HISTORY) ** ages[:, None].float()
    before = state[0] * (1 - 1 / HISTORY) ** len(votes.times)
    return (before + (low * fading).sum(0),)


Part = PersistenceTally
