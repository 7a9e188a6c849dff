"""Low-rank state of rejected entries, by learned features of keys and queries (LESS).

Dong, Yang, Zhang, Wang, Chi, Chen, "Get More with LESS: Synthesizing Recurrence with KV Cache
Compression for Efficient LLM Inference" (2024), arXiv:2402.09398. A rejected entry adds psi(k) v to
H and psi(k) to z; a query q adds phi(q) H to the numerator and phi(q) z to the denominator of its
attention to the entries that are kept. phi and psi are small perceptrons, psi with a learned
interaction of its outputs. `larder train less` trains them, one layer at a time.

H and z of a kv head are 8 (D + 1) numbers in float32, and take as many entries from the budget as
have their bytes: 4 where entries are float32, 8 where they are bfloat16. The released code adds
them to the budget. Under grouped queries psi belongs to a kv head and phi to a query head, as in
its code for Falcon.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.ops.low_rank_attention import state_bytes
from larder.policy.compensation.base import Compensation


@dataclass(frozen=True)
class Less(Compensation):
    """LESS's low-rank state."""

    cache_form = "low_rank"
    sums_rejected = True

    def state_entries(self, layer: LayerSpec, itemsize: int) -> int:
        entry = 2 * layer.head_dim * itemsize + POSITION_BYTES
        return max(1, round(state_bytes(layer.head_dim) / entry))

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        return plan


Part = Less
