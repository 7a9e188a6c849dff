"""Tally of count, mean and spread of an entry's weights over the queries that see it (RoCo).

Ren and Zhu, "On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model
Inference" (2024), arXiv:2402.06262 (RoCo). Query heads that share a kv head are averaged first, as
in the released EasyKV; a token's own query counts. EasyKV keeps sums of weights and of squares,
whose difference loses the digits of small variances; here the mean and the sum of squared
deviations from it go on, joined over chunks of queries as Chan, Golub and LeVeque do (1979).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.core.plan import StepColumn
from larder.ops.column_statistics import GroupReduction
from larder.ops.moments import added_moments
from larder.ops.packing import mask_until
from larder.policy.tallies._attention_weights import QueryWeights, State, update_columns
from larder.policy.tallies.base import Tally


class Moments(Tally):
    """Columns `moment_count`, `moment_mean` and `moment_spread`.

    The variance of an entry's weights is spread / count.
    """

    columns = ("moment_count", "moment_mean", "moment_spread")
    step_columns = (StepColumn.COUNT, StepColumn.MEAN, StepColumn.SPREAD)

    def update(self, observation: Observation) -> dict[str, Float[Tensor, " C"]]:
        return update_columns(observation, self.columns, GroupReduction.MEAN, _joined)


def _joined(state: State, votes: QueryWeights) -> State:
    count, mean, spread = state
    if len(votes.times) == 1:
        counted = mask_until(votes.positions, int(votes.times[0]))
        return added_moments(count, mean, spread, votes.weights[0], counted)
    sees = votes.sees
    fresh = sees.sum(0)
    average = votes.weights.sum(0) / fresh.clamp(min=1)
    around = ((votes.weights - average) * sees).square().sum(0)
    total = count + fresh
    shift, share = average - mean, fresh / total.clamp(min=1)
    return total, mean + shift * share, spread + around + shift.square() * count * share


Part = Moments
