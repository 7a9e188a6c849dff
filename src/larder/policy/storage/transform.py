"""Storage of kept entries as transform-coded components (the holding of Larder's own policy).

No publication has all of it; each part is known. Calibrated once per model, by layer and head: the
mean of keys before rotation is subtracted (Hooper et al., "KVQuant: Towards 10 Million Context
Length LLM Inference with KV Cache Quantization" (2024), arXiv:2401.18079, section 3.1, quantizes
keys before rotation); keys are weighed by the fourth root of the second moment of the queries,
averaged over rotations, values by that of the output projection; then both are decorrelated
(Karhunen-Loeve) and quantized with one step for all components of all layers, so that a component
whose deviation lies below the step takes no bits. KVTC, "KV Cache Transform Coding for Compact
Storage in LLM Inference" (2025), arXiv:2511.01815, codes caches at rest so; here entries are
attended to as they are coded. Entries of four times the median's score have half the step; of
scores that are logarithms (kvzap), those that lie log 4 above it. Other scores that may be negative
(locret, keydiff) have no ratios, so one negative score in any layer gives all entries of all layers
one step. Bit planes, a range coder with static tables or fixed widths hold the symbols.

Under a budget this spends the bytes that it saves: as many more entries are kept as fit at `bits`
per number, and the step is the smallest one whose bytes fit the budget. Which number of bits loses
least is a property of the model, which `larder.models.measurements.transform_bits` finds.

Behind park() it is what is parked that is held so, and the fast tier stays exact. The step is then
that with which the components of the calibration text take `bits` a number, so it is known before
any text, and an entry is coded once. `sinks`, `recent` and `tiers` say nothing of parked entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.arguments import require
from larder.core.codec import Coder, MeanSource, RopeStage, TransformSpec
from larder.core.errors import BadParameter
from larder.core.observation import Entries, LayerScores, ScoreScale
from larder.core.plan import Plan
from larder.policy.storage._exact_ends import OVERHEAD_BYTES, ExactEndsStorage

USUAL_BITS = 2.5  # per number, of models that were not measured
PARKED_BLOCK = 32  # most entries of an offloaded block: one for each state of the coder


@dataclass(frozen=True)
class Transform(ExactEndsStorage):
    """Sinks and the latest entries exact, all others transform coded.

    Args:
        bits: per number of the coded entries where the budget is full. A model that was measured
            by `larder model calibrate MODEL transform` has its own number where a sentence names
            none.
        coder: `planes` of bits; `entropy`, a range coder, which takes some bits less and which
            attention reads in more time; or `widths` for random access.
        sinks: first positions of a text that stay exact, where they are kept.
        recent: latest positions that stay exact, where they are kept.
        tiers: power of the scores by which precision is divided; 0 treats entries alike, as
            does a scorer with negative scores.
        block: most entries of a head that are coded together.
        metric: power of the metrics by which keys and values are weighed: 0, 0.5 or 1.
        rope: keys that are transformed: those `before` their rotary embedding, or `after` it.
        mean: that components are centered on: that of the calibrated `model`, or of the coded
            entries of the `text`, in a byte per component of each head.
    """

    bits: float = USUAL_BITS
    coder: Coder = Coder.PLANES
    sinks: int = 1
    recent: int = 1
    tiers: float = 1.0
    block: int = 256
    metric: float = 0.5
    rope: RopeStage = RopeStage.BEFORE
    mean: MeanSource = MeanSource.TEXT
    compares_layers: ClassVar[bool] = True
    measured_parameters: ClassVar[Mapping[str, str]] = MappingProxyType({"bits": "transform_bits"})

    def __post_init__(self) -> None:
        require(0 < self.bits <= 16, "transform.bits", "above 0, up to 16", self.bits)
        require(0 <= self.tiers <= 4, "transform.tiers", "in [0, 4]", self.tiers)
        if self.coder is Coder.LEVELS:
            raise BadParameter(
                "transform.coder must be entropy, planes or widths: kvquant() has levels."
            )
        _ = self.transform  # checks the rest

    @property
    def parked(self) -> TransformSpec:
        return replace(self.transform, block=min(self.block, PARKED_BLOCK), bits=self.bits)

    @property
    def transform(self) -> TransformSpec:
        return TransformSpec(
            self.coder,
            self.sinks,
            self.recent,
            self.block,
            metric=self.metric,
            rope=self.rope,
            mean=self.mean,
        )

    def coded_bytes(self, head_dim: int) -> float:
        return 2 * head_dim * self.bits / 8 + OVERHEAD_BYTES

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        like, heads = entries.empty_like, len(entries.lengths)
        allowed = heads * self.quota_bytes(quota, like.shape[1], like.dtype.itemsize)
        return replace(
            plan,
            grades=self.grades(plan, entries),
            importance=self._importance(scored, plan.kept),
            allowed_bytes=int(allowed),
        )

    def _importance(self, scored: LayerScores, kept: Int64[Tensor, " K"]) -> Float[Tensor, " K"]:
        """Binary logarithms of the kept scores; NaN for all where a score of any is negative."""
        scores, numbers = scored.scores, scored.scores[kept]
        if not self.tiers:
            return torch.zeros_like(numbers)
        if scored.scale is ScoreScale.LOGARITHMS:
            return self.tiers / math.log(2) * numbers
        if bool(((scores < 0) & scores.isfinite()).any()):
            return torch.full_like(numbers, torch.nan)
        return self.tiers * numbers.clamp(min=0).log2()


Part = Transform
