"""The weight that an entry got lately: old queries count less and less.

Ghadia et al., "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs"
(2025), arXiv:2503.00979 (MorphKV), judges entries by the weights of the last R queries. The
released code keeps all of these, R rows as long as the cache for every query head, which can
outweigh the entries themselves. Here two numbers stand for them: a sum, and a maximum, in which
what a query gave shrinks by 1 / 32 with every token after it, so that they look back about as far
as R = 32. A tally takes no parameter. Query heads that share a kv head are summed, as in the
released code, which sums logits where we sum weights.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Seen
from larder.ops.columns import Group
from larder.policy.tallies._weights import State, Votes, carried_on
from larder.policy.tallies.base import Tally

HORIZON_TOKENS = 32
KEEPS = 1 - 1 / HORIZON_TOKENS  # share of a weight that is left one token later


class Fading(Tally):
    """The columns `fading_sum` and `fading_max`."""

    columns = ("fading_sum", "fading_max")

    def update(self, seen: Seen) -> dict[str, Float[Tensor, " C"]]:
        return carried_on(seen, self.columns, Group.SUM, _faded)


def _faded(state: State, votes: Votes) -> State:
    if len(votes.times) == 1:
        weights = votes.weights[0]
        return KEEPS * state[0] + weights, torch.maximum(KEEPS * state[1], weights)
    ages = (votes.times[-1] - votes.times).to(torch.float32)[:, None]
    left = votes.weights * KEEPS**ages  # [c, S]
    kept = KEEPS ** len(votes.times)
    return kept * state[0] + left.sum(0), torch.maximum(kept * state[1], left.amax(0))


Part = Fading
