"""Storage at calibrated levels, keys before rotation, with outliers apart (KVQuant).

Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization"
(2024), arXiv:2401.18079: keys are quantized before their rotary embedding, with an offset and a
scale per channel that are calibrated offline, values with an offset and a scale per token; levels
are those of k-means on a calibration text, weighed by the Fisher information (nuqX); 1 % of the
numbers are kept apart as they are; the first token stays exact. Checked against released code.

What differs: vectors are those of one head, where the paper has those of all heads of a token,
since heads keep other entries. So an offset and a scale are paid for by every head, and of a value
of 64 channels one number is an outlier. Outliers of keys are capped at their share of a block: the
budget is kept. What is coded again, because others leave, keeps what it was rounded to, except
outliers of keys that are no longer among the largest of their block. Generated entries wait for a
block of 64 before they are coded. Q-Norm, which the paper has for two bits, is left out.

Under a budget this spends the bytes that it saves: as many more entries are kept as fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from larder.core.arguments import require
from larder.core.codec import LEVEL_BITS, Coder, MeanSource, TransformSpec
from larder.core.observation import Entries, LayerScores
from larder.core.plan import Plan
from larder.ops.level_coder import bytes_per_entry
from larder.policy.storage._exact_ends import OVERHEAD_BYTES, ExactEndsStorage

STEP = 1.0  # levels have none of their own


@dataclass(frozen=True)
class KVQuant(ExactEndsStorage):
    """The first entries exact, all others at calibrated levels.

    Args:
        bits: per number, 2 to 4.
        outliers: share of the numbers that are kept apart.
        sinks: first positions of a text that stay exact, where they are kept.
        recent: latest positions that stay exact, where they are kept.
        block: most entries of a head that are coded together.
    """

    bits: int = 3
    outliers: float = 0.01
    sinks: int = 1
    recent: int = 0
    block: int = 256

    def __post_init__(self) -> None:
        require(self.bits in LEVEL_BITS, "kvquant.bits", "2, 3 or 4", self.bits)
        require(0 <= self.outliers < 0.5, "kvquant.outliers", "a share below a half", self.outliers)
        for name, tokens in (("sinks", self.sinks), ("recent", self.recent)):
            require(tokens >= 0, f"kvquant.{name}", "at least 0", tokens)
        require(1 <= self.block <= 256, "kvquant.block", "from 1 to 256", self.block)

    @property
    def transform(self) -> TransformSpec:
        return TransformSpec(
            Coder.LEVELS,
            self.sinks,
            self.recent,
            self.block,
            mean=MeanSource.MODEL,
            level_bits=self.bits,
            outliers=self.outliers,
        )

    def coded_bytes(self, head_dim: int) -> float:
        return bytes_per_entry(self.bits, self.outliers, head_dim) + OVERHEAD_BYTES

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        return replace(plan, grades=self.grades(plan, entries), step=STEP)


Part = KVQuant
