"""Quantized storage in which two neighboring layers share the directions of their entries.

Liu et al., "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models" (2024),
arXiv:2405.14366: MiniCache as the paper reports it, on top of quantization to 4 bits. Directions
and what is left unshared are rounded as `quantized` rounds entries; norms stay in float32, scaled
so that every vector keeps its length. Known to us from the paper's abstract and secondary accounts:
the paper's 4 bits are applied to a text without eviction, and how its groups are cut is inferred.

Under a budget the bytes that rounding and pairing save are spent: as many more entries are kept as
fit. For that the upper layer of a pair keeps the entries that the lower one keeps, so that all of
them can be shared, and at most the share `apart` of the entries stays unshared. Where a budget
gives more to layers that are not paired, whose entries take more bytes, every head gives up its
lowest entries until the bytes fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from larder.core.arguments import require
from larder.core.codec import Codec
from larder.core.observation import Entries, LayerScores
from larder.core.plan import LayerPlans, Plan
from larder.core.spec import POSITION_BYTES, LayerPairing, LayerSpec
from larder.core.types import Packed
from larder.policy.storage._mixed_precision import (
    MixedPrecisionStorage,
    PrecisionTier,
    full_bytes,
    kept_grades,
)
from larder.policy.storage.quantized import check_codec

SHARED_BYTES = 16 + 2 + 2 + POSITION_BYTES  # of a shared entry: norms, head, holders, position

Shape = tuple[int, int]  # kv heads and head size of a layer


@dataclass(frozen=True)
class QuantizedPairs(MixedPrecisionStorage):
    """The latest entries exact, all others rounded; pairs of layers hold one direction for both.

    Args:
        bits: per number, from 1 to 8.
        group: entries rounded together, and channels of a value that share a scale.
        start: share of the layers, counted from the first, that are not paired.
        weight: of the upper layer's direction in the shared one, in [0, 1].
        apart: upper part of the range of angles between directions that is not shared, and the
            largest share of the entries that is not.
    """

    compares_layers: ClassVar[bool] = True

    bits: int = 4
    group: int = 32
    start: float = 0.5
    weight: float = 0.6
    apart: float = 0.05

    def __post_init__(self) -> None:
        check_codec("quantized_pairs", self.bits, self.group)
        for name in ("start", "weight", "apart"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"quantized_pairs.{name}", "in [0, 1]", value)

    @property
    def form(self) -> str:
        return "paired"

    @property
    def pairing(self) -> LayerPairing:
        return LayerPairing(self.start, self.weight, self.apart)

    def tiers(self) -> tuple[PrecisionTier, ...]:
        return (PrecisionTier(Codec(self.bits, self.bits, self.group), 1.0),)

    def entries(self, tokens: int, layers: Sequence[LayerSpec], itemsize: int) -> int:
        super().entries(tokens, layers, itemsize)  # refuses a budget that is too small
        shapes = {layer.index: (layer.kv_heads, layer.head_dim) for layer in layers}
        reserved = self.residual_window + self.reserved_entries(layers, itemsize)
        heads = sum(kv_heads for kv_heads, _ in shapes.values())
        full = sum(k * full_bytes(size, itemsize) for k, size in shapes.values()) / max(heads, 1)
        spent = self._mean_cost(shapes, self.pairing.pairs(layers), itemsize)
        return self.residual_window + int((tokens - reserved) * full / spent)

    def reserved_entries(self, layers: Sequence[LayerSpec], itemsize: int) -> int:
        codec = self.codecs[0]  # entries of a head may end two groups: their own and a shared one
        sizes = {layer.head_dim for layer in layers}
        taken = [codec.group_bytes(size) / full_bytes(size, itemsize) for size in sizes]
        return math.ceil(max(taken, default=0))

    def rank(self, scored: LayerScores, entries: Entries) -> Packed:
        return entries.packed_positions().float()

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        graded = super().grade(plan, entries, scored, quota, share)
        importance = scored.ranked().float()
        importance = importance.index_fill(0, plan.folds.targets, math.inf)[plan.kept]
        like = entries.empty_like
        cost = self.codecs[0].bytes_per_entry(like.shape[1], like.dtype.itemsize)
        most = math.ceil(quota * len(entries.lengths) * cost)  # without pairs
        return replace(graded, importance=importance, allowed_bytes=most)

    def allocate(self, plans: Mapping[int, Plan], entries: Callable[[int], Entries]) -> LayerPlans:
        held = {index: entries(index) for index in sorted(plans)}
        shapes = {i: (len(own.lengths), own.empty_like.shape[1]) for i, own in held.items()}
        found = self.pairing.pairs_of(shapes)
        pairs = [pair for pair in found if _hold_alike(*(held[index] for index in pair))]
        paired = dict(plans)
        for lower, upper in pairs:
            own, other = plans[lower], plans[upper]
            own = replace(own, scalars=other.scalars, allowed_bytes=other.allowed_bytes)
            grades = torch.maximum(own.grades, kept_grades(own, held[upper]))
            paired[upper] = replace(own, grades=grades)
        itemsize = next(iter(held.values())).empty_like.dtype.itemsize if held else 1
        share = self._fitting_share(paired, shapes, (found, pairs), itemsize)
        return {index: _shortened(plan, share) for index, plan in paired.items()}

    def _costs(
        self, shapes: Mapping[int, Shape], pairs: Sequence[tuple[int, int]], itemsize: int
    ) -> dict[int, float]:
        """Bytes of a quantized entry in each layer, on average."""
        codec, shared = self.codecs[0], {index for pair in pairs for index in pair}
        found = dict[int, float]()
        for index, (_, size) in shapes.items():
            entry_bytes = codec.bytes_per_entry(size, itemsize)
            half = (1 - self.apart) * (entry_bytes + SHARED_BYTES) / 2 + self.apart * entry_bytes
            found[index] = half if index in shared else entry_bytes
        return found

    def _mean_cost(
        self, shapes: Mapping[int, Shape], pairs: Sequence[tuple[int, int]], itemsize: int
    ) -> float:
        """Bytes of a quantized entry, on average over heads."""
        costs = self._costs(shapes, pairs, itemsize)
        heads = sum(kv_heads for kv_heads, _ in shapes.values())
        return sum(shapes[i][0] * cost for i, cost in costs.items()) / max(heads, 1)

    def _fitting_share(
        self,
        plans: Mapping[int, Plan],
        shapes: Mapping[int, Shape],
        pairs: tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]],
        itemsize: int,
    ) -> float:
        """Share of the quantized entries that fits both the bytes and the number of all quotas.

        Args:
            pairs: those that the budget was spent on, and those that hold the same entries.
        """
        alone, costs = self._costs(shapes, (), itemsize), self._costs(shapes, pairs[1], itemsize)
        mean = self._mean_cost(shapes, pairs[0], itemsize)
        most = bytes_left = coded_bytes = 0.0
        coded = 0
        for index, plan in plans.items():
            kv_heads, size = shapes[index]
            quota = plan.allowed_bytes / alone[index]
            window = min(self.residual_window * kv_heads, quota)
            exact = len(plan.kept) - int((plan.grades > 0).sum())
            bytes_left += (window - exact) * full_bytes(size, itemsize)
            bytes_left += (quota - window) * mean
            most += quota - exact
            coded += len(plan.kept) - exact
            coded_bytes += (len(plan.kept) - exact) * costs[index]
        return min(1.0, bytes_left / max(coded_bytes, 1.0), most / max(coded, 1))


def _hold_alike(one: Entries, other: Entries) -> bool:
    """True if two layers hold entries of the same tokens."""
    if one.lengths != other.lengths:
        return False
    positions = one.packed_positions(), other.packed_positions()
    return torch.equal(positions[0].cpu(), positions[1].cpu())


def _shortened(plan: Plan, share: float) -> Plan:
    """Plan that keeps a share of each head's quantized entries, those of highest importance."""
    stays = torch.ones(len(plan.kept), dtype=torch.bool, device=plan.kept.device)
    start = 0
    for length in plan.lengths:
        rows = start + torch.nonzero(plan.grades[start : start + length]).flatten()
        start += length
        over = len(rows) - int(share * len(rows))
        stays[rows[plan.importance[rows].argsort(stable=True)[:over]]] = False
    return _selected(plan, stays)


def _selected(plan: Plan, stays: Bool[Tensor, " T"]) -> Plan:
    """Plan that keeps some of its entries; importance is spent."""
    counts = [int(part.sum()) for part in torch.split(stays, list(plan.lengths))]
    return replace(
        plan,
        kept=plan.kept[stays],
        lengths=tuple(counts),
        columns={name: column[stays] for name, column in plan.columns.items()},
        grades=plan.grades[stays],
        importance=plan.importance[:0],
        allowed_bytes=0,
    )


Part = QuantizedPairs
