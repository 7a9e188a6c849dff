"""Tally of the last time that an entry was needed, and its longest interval (LazyEviction).

Zhang et al., "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient
Long Reasoning" (2025), arXiv:2506.15969: recurrence interval tracking. A query needs an entry that
it gives a weight of alpha = 0.0001 or more, the value of the released scripts; a tally takes no
parameter. As there, an entry comes as if last needed one token before itself, so that the first
need that it has of itself is an interval of 1.

Differs: text that is read counts as well, where the released code starts all entries of a prompt
again when decode begins; and of the query heads that share a kv head the neediest counts, where
that code keeps a copy of the entry for each.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.ops.column_statistics import GroupReduction
from larder.policy.tallies._attention_weights import QueryWeights, State, update_columns
from larder.policy.tallies.base import Tally

ALPHA = 1e-4


class RecurrenceTally(Tally):
    """Columns `last_needed`, a true position, and `longest_gap`, in tokens; 0 for never."""

    columns = ("last_needed", "longest_gap")

    def update(self, observation: Observation) -> dict[str, Float[Tensor, " C"]]:
        return update_columns(observation, self.columns, GroupReduction.MAX, _tracked)


def _tracked(state: State, votes: QueryWeights) -> State:
    times = votes.times.to(torch.float32)[:, None]
    comes = votes.positions >= votes.times[0]
    last = torch.where(comes, votes.positions.to(torch.float32) - 1, state[0])
    needs = votes.weights >= ALPHA  # [c, S]
    marks = torch.cat([last[None], torch.where(needs, times, -torch.inf)])
    latest = marks.cummax(0).values  # [c + 1, S]
    gaps = torch.where(needs, times - latest[:-1], 0.0).amax(0)
    return latest[-1], torch.maximum(state[1], gaps)


Part = RecurrenceTally
