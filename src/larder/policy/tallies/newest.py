"""Tally of the softmax weight of an entry from the newest query.

Oren et al., "Transformers are Multi-State RNNs" (2024), arXiv:2401.06104 (TOVA) ranks entries by
it. Zhang et al., "CaM: Cache Merging for Memory-efficient LLMs Inference" (2024), ICML, PMLR
235:58840-58850, compares an entry that leaves the cache with those that stay. Query heads that
share a kv head are summed.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from larder.core.observation import Observation
from larder.core.plan import StepColumn
from larder.ops.column_statistics import GroupReduction
from larder.policy.tallies._attention_weights import newest_query_weights
from larder.policy.tallies.base import Tally

NEWEST = "newest"


class Newest(Tally):
    """Column `newest`."""

    columns = (NEWEST,)
    step_columns = (StepColumn.NEWEST,)

    def update(self, observation: Observation) -> dict[str, Float[Tensor, " C"]]:
        return {NEWEST: newest_query_weights(observation, GroupReduction.SUM)}


Part = Newest
