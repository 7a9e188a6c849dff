"""Storage with a bit width per entry, from the tolerated error of its key and value (QAQ).

Dong et al., "QAQ: Quality Adaptive Quantization for LLM KV Cache" (2024), arXiv:2403.04643. The
deviation that rounding may bring to a value is sqrt(12 / T) * error / s, s the highest weight that
any of the last queries gives it, T the entries; to a key, the same for all, it is
sqrt(12 / |q|^2 * ln(T^3 / (T - 1) * error^2 + 1)). A vector from its least to its largest number
then takes ceil(log2(range / (2 * deviation) + 1)) bits. Formulas as in the released code.

The range is that without the numbers that stand out, which are kept apart: half a percent at either
end in the paper. The newest tokens, which too few queries have attended to, take the most bits: all
but one of as many as the last queries are.

Bits are any whole number from 1 to 8; the paper sets no limit. Differences: q is scaled as the
model scales it and |q|^2 is the 90th percentile of the last queries, where the released code
divides by a constant of 300; a vector has a grid per `group` channels, from its least to its
largest number, instead of one about its mean, which is coarser; the latest entries are exact until
they make a group, and an entry's bits are decided once, when it is rounded, or rounded again
because others were merged into it. The ends of a vector are interpolated between its numbers
(inferred).

A budget is spent as if all took 8 bits, so this holds fewer bytes than the budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.arguments import require
from larder.core.codec import GROUP_BYTES, Codec, ScaleGranularity
from larder.core.observation import Entries, LayerScores, Observation, StorageStatistics
from larder.core.plan import Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.types import Packed
from larder.policy.aggregation.max import Max
from larder.policy.attention_reduction import gather_last_queries
from larder.policy.storage._mixed_precision import (
    Grades,
    MixedPrecisionStorage,
    PrecisionTier,
    assign_grades,
    kept_grades,
)
from larder.policy.storage.quantized import check_codec

BITS = tuple(range(8, 0, -1))
ROWS = 1 << 14  # vectors sorted at once: 16 MiB of vectors of size 128
NORM = 0.9  # which of the queries' norms, as a quantile


@dataclass(frozen=True)
class QAQ(MixedPrecisionStorage):
    """Bits of each entry's key and value from what error they may have.

    Args:
        key_error, value_error: the deviation of attention's output that rounding may bring.
        group: entries rounded together, and channels of a value that share a scale.
        outliers: share of the numbers that are kept apart.
        window: last queries whose attention is observed, in tokens.
    """

    key_error: float = 1e-4
    value_error: float = 0.1
    group: int = 32
    outliers: float = 0.01
    window: int = 32

    def __post_init__(self) -> None:
        check_codec("qaq", BITS[0], self.group, self.outliers)
        for name, error in (("key_error", self.key_error), ("value_error", self.value_error)):
            require(0 < error < math.inf, f"qaq.{name}", "above 0", error)
        require(self.window >= 1, "qaq.window", "at least 1 token", self.window)

    def tiers(self) -> tuple[PrecisionTier, ...]:
        """Every pair of bit widths, keys before values; the budget is computed with the first."""
        pairs = [(key, value) for key in BITS for value in BITS]
        return tuple(
            PrecisionTier(
                Codec(key, value, self.group, self.outliers, key_scales=ScaleGranularity.ENTRY),
                float(index == 0),
            )
            for index, (key, value) in enumerate(pairs)
        )

    def reserved_entries(self, layers: Sequence[LayerSpec], itemsize: int) -> int:
        """Entries reserved for the records of groups that are not full, one per pair of bits."""
        size = max((layer.head_dim for layer in layers), default=1)
        records = len(self.codecs) * GROUP_BYTES
        return math.ceil(records / (2 * size * itemsize + POSITION_BYTES))

    def rank(self, scored: LayerScores, entries: Entries) -> Packed:
        return entries.packed_positions().float()

    def inspect(self, observation: Observation) -> StorageStatistics:
        """Highest attention weight of each entry, and the norm of the last queries."""
        queries = observation.queries[:, -self.window :]
        heads = gather_last_queries(Max(), observation, self.window)
        norms = (queries.float() * observation.layer.scaling).square().sum(-1).flatten()
        weights = torch.cat([head.amax(0) for head in heads])
        return StorageStatistics(weights=weights, numbers=(float(norms.quantile(NORM)),))

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        before = kept_grades(plan, entries)
        capacity = self.capacities(
            quota, entries.empty_like.shape[1], entries.empty_like.dtype.itemsize
        )[0]
        ranked = self.rank(scored, entries)[plan.kept]
        demoted = assign_grades(plan, ranked, before, [capacity], [self.group]) > 0
        own = self.sufficient_grades(entries, scored)[plan.kept]
        grades = torch.where((before == 0) & demoted, own, before)
        return replace(plan, grades=grades)

    def sufficient_grades(self, entries: Entries, scored: LayerScores) -> Grades:
        """Grade of every packed entry if it were quantized now."""
        counts = torch.tensor(entries.lengths, device=entries.positions.device)
        total = torch.repeat_interleave(counts, counts).double()  # T of each entry's head
        weights = scored.storage_statistics.weights.double().clamp(
            min=torch.finfo(torch.float32).tiny
        )
        value = (12 / total).sqrt() * self.value_error / weights
        growth = total**3 / (total - 1).clamp(min=1) * self.key_error**2 + 1
        key = (12 / max(scored.storage_statistics.numbers[0], 1e-12) * growth.log()).sqrt()
        keys = _bits_index(needed_bits(self._ranges(entries.pack(entries.keys)), key))
        values = _bits_index(needed_bits(self._ranges(entries.pack(entries.values)), value))
        positions = entries.packed_positions()
        is_new = positions > positions.max() - (self.window - 1)
        return (1 + len(BITS) * keys + values).masked_fill(is_new, 1).to(torch.int8)

    def _ranges(self, vectors: Float[Tensor, "T D"]) -> Float[Tensor, " T"]:
        """Range of each vector without its outliers."""
        cut = self.outliers / 2
        shares = vectors.new_tensor([cut, 1 - cut], dtype=torch.float64)
        ends = [part.double().quantile(shares, dim=1) for part in torch.split(vectors, ROWS)]
        low, high = torch.cat(ends, dim=1)
        return high - low


def needed_bits(ranges: Float[Tensor, " T"], deviation: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Bits for which a quantization step over each range is at most twice the deviation."""
    return torch.ceil(torch.log2(ranges / (2 * deviation) + 1))


def _bits_index(needed: Float[Tensor, " T"]) -> Int64[Tensor, " T"]:
    """Index in `BITS` of the narrowest sufficient width of each vector."""
    return BITS[0] - needed.clamp(min=BITS[-1], max=BITS[0]).long()


Part = QAQ
