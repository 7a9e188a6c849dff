"""Offload of rejected entries to host memory, with recall for later queries (IceCache).

Mao, Wang, Ester, Li, "IceCache: Memory-efficient KV-cache Management for Long-Sequence LLMs"
(2026), arXiv:2604.10539, does so with all but the first and latest tokens. Any scorer can stand
before it: what it scores highest stays in the fast tier, and the recall part of the policy finds
the rest. Nothing is lost: a text is read with attention to all of it, whatever the budget, unless
the recall part reads by what it finds (`votes(prefill="recalled")`).

Unless a cut is asked for, which drops the entries of the lowest scores for good, once, when the
text has been read. `cut="split"` is the first stage of Behnam et al., "RocketKV: Accelerating
Long-Context LLM Inference via Two-Stage KV Cache Compression" (2025), arXiv:2502.14051: of n
entries under a budget of M there stay n / z**r with z = n / M and r = min(0.2 + 0.06 * log2(z),
0.8), so that search has the rest of the way to go. `cut="budgets"` keeps a number of budgets, as
Zhu et al., "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching" (2025),
arXiv:2504.00970, and `cut="share"` a share of the text, as Zeng et al., "MPCache: MPC-Friendly KV
Cache Eviction for Efficient Private Large Language Model Inference" (2025), arXiv:2501.06807. What
stays in the fast tier counts. Unlike RocketKV, whose number leaves room for what is generated,
nothing that is generated is dropped by these.

`cut="streaming"` drops, always, what heads reject that the budget gives no weight: streaming heads
see the first tokens and the latest, and the others recall, as in Yang et al., "LServe: Efficient
Long-sequence LLM Serving with Unified Sparse Attention" (2025), arXiv:2502.14866. Its two sizes of
pages, and its choice that stands for some steps, are the recall part `lserve`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Entries, LayerScores, Phase
from larder.core.plan import Plan
from larder.ops.packing import mask_of, unmasked_indices
from larder.ops.topk import top_per_head
from larder.policy.compensation._token_merge import heads_of, rejected_indices
from larder.policy.compensation.base import Compensation


class Cut(Enum):
    """Rule by which some rejected entries are dropped instead of offloaded."""

    NOTHING = "nothing"
    SPLIT = "split"
    BUDGETS = "budgets"
    SHARE = "share"
    STREAMING = "streaming"


@dataclass(frozen=True)
class Park(Compensation):
    """Offload of rejected entries to host memory.

    Args:
        host_mib: most host memory that they may take, in MiB per cache; left open, as much as the
            machine has.
        cut: `nothing` is dropped; `split` keeps as many as RocketKV, `budgets` so many budgets, and
            `share` such a share of the text, over both tiers; `streaming` keeps all of the heads
            that the budget takes for retrieval heads, and parks nothing of the others.
        size: the number of budgets, at least 1, or the share, in (0, 1].
        tokens: the budget of a cut, in entries per kv head; left open, the policy's.
    """

    host_mib: int | None = None
    cut: Cut = Cut.NOTHING
    size: float = 1.0
    tokens: int | None = None
    offloads = True
    cache_form = "tiered"

    def __post_init__(self) -> None:
        if self.host_mib is not None and self.host_mib < 1:
            raise BadParameter(f"park.host_mib must be at least 1 MiB, got {self.host_mib}.")
        if self.cut is Cut.SHARE and not 0 < self.size <= 1:
            raise BadParameter(f"park.size must be a share in (0, 1], got {self.size}.")
        if self.cut is Cut.BUDGETS and not 1 <= self.size < math.inf:
            raise BadParameter(f"park.size must be at least 1 budget, got {self.size}.")
        require(self.tokens is None or self.tokens >= 1, "park.tokens", "at least 1", self.tokens)

    @property
    def needs_whole_text(self) -> bool:
        return self.cut not in (Cut.NOTHING, Cut.STREAMING)

    def with_budget(self, tokens: int) -> Park:
        if not self.needs_whole_text or self.tokens is not None:
            return self
        return replace(self, tokens=tokens)

    @property
    def separates_streaming_heads(self) -> bool:
        return self.cut is Cut.STREAMING

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        if self.separates_streaming_heads:
            return self._without_streams(plan, entries, scored)
        if not self.needs_whole_text or scored.phase is not Phase.PREFILL or not entries.lengths:
            return plan
        stays = max(self.remaining(max(entries.lengths)), *plan.lengths, 0)
        kept = mask_of(plan.kept, sum(entries.lengths))
        scores = scored.ranked()
        left = top_per_head(scores, entries.lengths, stays, kept)
        return replace(plan, dropped=unmasked_indices(mask_of(left, len(kept))))

    def _without_streams(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        """Plan that drops the rejected entries of heads without weight."""
        rejected = rejected_indices(plan, entries)
        weights = scored.weights or (1.0,) * len(entries.lengths)  # none: all heads alike
        streams = torch.tensor([weight == 0 for weight in weights], device=rejected.device)
        return replace(plan, dropped=rejected[streams[heads_of(rejected, entries)]])

    def remaining(self, num_entries: int) -> int:
        """Entries per kv head that remain after the cut, over both tiers."""
        budget = num_entries if self.tokens is None else self.tokens
        if self.cut is Cut.SHARE:
            return math.ceil(self.size * num_entries)
        if self.cut is Cut.BUDGETS:
            return min(num_entries, math.ceil(self.size * budget))
        times = num_entries / budget
        if self.cut is Cut.NOTHING or times <= 1:
            return num_entries
        return math.ceil(num_entries / times ** min(0.2 + 0.06 * math.log2(times), 0.8))


Part = Park
