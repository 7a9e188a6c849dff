"""Storage with a bit width per entry, 0 for eviction, by reverse water-filling (RDKV).

Zhang, Guo, Benini, Li, "RDKV: Rate-Distortion Bit Allocation for Joint Eviction and Quantization
of the KV Cache" (2026), arXiv:2605.08317, known to us from its abstract and from secondary
accounts: eviction and quantization are ends of one allocation of bits, entries are weighed by the
distortion of attention that their compression causes, and reverse water-filling gives each a width
from full precision down to 0, once, after the prompt was read.

Inferred: an entry's weight is the sum over the last queries of its squared attention weight, times
the squared norm of its value, which is how far the output moves without it. One water level serves
all layers and heads. An entry whose weight is 4^b times the level is due b bits, and takes the
nearest width of 0, 2, 4, 8 and 16. Keys and values of an entry have the same width, on the grids
of KIVI; the paper also gives widths to channels, which is left out. The question is not among the
queries here unless it was read.

A budget is spent in bytes: the level is the lowest one whose widths fit them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.arguments import require
from larder.core.codec import Codec
from larder.core.errors import ScoreError
from larder.core.observation import Entries, LayerScores, Observation, StorageStatistics
from larder.core.plan import LayerPlans, Plan
from larder.core.spec import POSITION_BYTES, LayerSpec
from larder.core.types import Packed, WeightChunk
from larder.policy.aggregation.sum import Sum
from larder.policy.attention_reduction import gather_last_queries
from larder.policy.storage._mixed_precision import kept_grades
from larder.policy.storage.base import Storage
from larder.policy.storage.quantized import check_codec

WIDTHS = (16, 8, 4, 2, 0)  # of grades 0, 1, 2, 3, and of eviction
EVICTED = len(WIDTHS) - 1
ROUNDS = 60  # of the bisection of the level


@dataclass(frozen=True)
class RDKV(Storage):
    """Widths of 16, 8, 4, 2 and 0 bits by weight.

    Args:
        group: entries rounded together, and channels of a value that share a scale.
        window: last queries whose attention weighs entries, in tokens; 0 takes the scores of the
            policy as attention weights, and refuses negative ones.
    """

    group: int = 32
    window: int = 32
    compares_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_codec("rdkv", WIDTHS[1], self.group)
        require(self.window >= 0, "rdkv.window", "0 tokens or more", self.window)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return tuple(Codec(bits, bits, self.group) for bits in WIDTHS[1:EVICTED])

    def entries(self, tokens: int, layers: Sequence[LayerSpec], itemsize: int) -> int:
        gains = [self._gain(layer.head_dim, itemsize) for layer in layers]
        return int(tokens * min(gains, default=1.0))

    def full_precision_entries(self, quota: int, layer: LayerSpec, itemsize: int) -> int:
        return int(quota / self._gain(layer.head_dim, itemsize))

    def inspect(self, observation: Observation) -> StorageStatistics:
        """Squared norm of each value, times the squared attention weights of the last queries."""
        energies = observation.entries.pack(observation.entries.values).float().square().sum(1)
        if self.window:
            heads = gather_last_queries(SquareSum(), observation, self.window)
            energies = energies * torch.cat([head.sum(0) for head in heads])
        return StorageStatistics(weights=energies)

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        """Plan with the weights of its entries; `allocate` gives the grades."""
        weights = scored.storage_statistics.weights.double()
        if not self.window:
            weights = weights * _attention_weights(scored.scores).square()
        least = torch.finfo(weights.dtype).tiny  # an entry without weight takes what others leave
        logarithms = weights.clamp(min=least).log2()
        importance = logarithms.masked_fill(scored.protected, math.inf)[plan.kept]
        floor = torch.zeros_like(importance, dtype=torch.bool)
        floor[torch.searchsorted(plan.kept, plan.folds.targets.contiguous())] = True
        like = entries.empty_like
        allowed = quota / self._gain(like.shape[1], like.dtype.itemsize)
        return replace(
            plan,
            grades=kept_grades(plan, entries),
            importance=importance.masked_fill(floor, math.inf).float(),
            allowed_bytes=int(len(entries.lengths) * allowed * _costs(self, like)[0]),
        )

    def allocate(self, plans: Mapping[int, Plan], entries: Callable[[int], Entries]) -> LayerPlans:
        costs = {index: _costs(self, entries(index).empty_like) for index in plans}
        weights = {index: plan.importance.double().cpu() for index, plan in plans.items()}
        allowed = sum(plan.allowed_bytes for plan in plans.values())
        level = water_level(weights, costs, allowed)
        return {
            index: _with_widths(plan, widths_at(weights[index], level))
            for index, plan in plans.items()
        }

    def _gain(self, head_dim: int, itemsize: int) -> float:
        """Entries of the lowest width in the bytes of an exact one."""
        full = 2 * head_dim * itemsize + POSITION_BYTES
        return max(full / self.codecs[-1].bytes_per_entry(head_dim, itemsize), 1.0)


@dataclass(frozen=True)
class SquareSum(Sum):
    """Sum of squared weights over queries."""

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        super().fold(state, weights.square(), first, total)

    def single_query(self, weights: Float[Tensor, "R S"]) -> Float[Tensor, "R S"]:
        return weights.square()


def _attention_weights(scores: Packed) -> Packed:
    """Scores as attention weights, minus infinity as 0.

    Raises:
        ScoreError: one is negative.
    """
    found = scores.double().masked_fill(scores == -math.inf, 0.0)
    if bool((found < 0).any()):
        raise ScoreError(
            "rdkv(window=0) takes scores as attention weights, but one is "
            f"{float(found.min()):.3g}: take a scorer whose scores are 0 or more, such as "
            "reconstruct() or expected(), or leave window out."
        )
    return found


def water_level(
    weights: Mapping[int, Packed], costs: Mapping[int, Float[Tensor, " W"]], allowed: int
) -> float:
    """Lowest level, as a binary logarithm, at which the widths of all layers fit the bytes.

    Args:
        weights: binary logarithms of the weights of each layer.
        costs: bytes of an entry of each width.
    """
    finite = [weight[weight.isfinite()] for weight in weights.values()]
    known = torch.cat([torch.zeros(1).double(), *finite])
    low, high = float(known.min()) - 2 * WIDTHS[0] - 2, float(known.max()) + 2
    if _bytes(weights, costs, low) <= allowed:
        return low
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if _bytes(weights, costs, middle) <= allowed:
            high = middle
        else:
            low = middle
    return high


def widths_at(weights: Packed, level: float) -> Int64[Tensor, " T"]:
    """Index of the width of each entry at a level."""
    due = (weights - level) / 2
    middles = [(high + low) / 2 for high, low in zip(WIDTHS, WIDTHS[1:], strict=False)]
    return (due[:, None] < torch.tensor(middles, dtype=due.dtype)).sum(1)


def _bytes(
    weights: Mapping[int, Packed], costs: Mapping[int, Float[Tensor, " W"]], level: float
) -> float:
    return sum(float(costs[i][widths_at(weight, level)].sum()) for i, weight in weights.items())


def _costs(part: RDKV, like: Float[Tensor, "0 D"]) -> Float[Tensor, " W"]:
    """Bytes of an entry of each width."""
    size, itemsize = like.shape[1], like.dtype.itemsize
    coded = [codec.bytes_per_entry(size, itemsize) for codec in part.codecs]
    return torch.tensor([2 * size * itemsize + POSITION_BYTES, *coded, 0.0])


def _with_widths(plan: Plan, widths: Int64[Tensor, " T"]) -> Plan:
    """Plan without the entries of no bits, the others at their widths, never a finer one."""
    stays = widths < EVICTED
    heads = torch.repeat_interleave(torch.arange(len(plan.lengths)), torch.tensor(plan.lengths))
    counts = torch.bincount(heads[stays], minlength=len(plan.lengths))
    there = stays.to(plan.kept.device)
    grades = torch.maximum(plan.grades.cpu().long(), widths)[stays]
    return replace(
        plan,
        kept=plan.kept[there],
        lengths=tuple(counts.tolist()),  # pyright: ignore
        columns={name: column[there] for name, column in plan.columns.items()},
        grades=grades.to(torch.int8).to(plan.kept.device),
        importance=plan.importance[:0],
        allowed_bytes=0,
    )


Part = RDKV
