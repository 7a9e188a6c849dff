"""Tally of the softmax weight of an entry, summed over all queries so far (H2O).

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(2023), arXiv:2306.14048, section 4: accumulated attention. Query heads that share a kv head are
summed. Sums are float32; a token's own query counts.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.core.plan import StepColumn
from larder.ops.column_statistics import GroupReduction
from larder.policy.tallies._attention_weights import QueryWeights, State, update_columns
from larder.policy.tallies.base import Tally


class Mass(Tally):
    """Column `mass`."""

    columns = ("mass",)
    step_columns = (StepColumn.MASS,)
    sums_weights = True

    def update(self, observation: Observation) -> dict[str, Float[Tensor, " C"]]:
        if observation.weight_sums is None:
            return update_columns(observation, self.columns, GroupReduction.SUM, _added)
        entries = observation.entries
        return {"mass": entries.columns["mass"] + entries.unpack(observation.weight_sums)}


def _added(state: State, votes: QueryWeights) -> State:
    return (state[0] + votes.total,)


Part = Mass
