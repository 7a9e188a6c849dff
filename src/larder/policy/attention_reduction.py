"""Reduction of attention weights over queries and query heads to one score per entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from larder.core.arguments import require
from larder.core.observation import Entries, Observation
from larder.core.part import LOG_COUNT
from larder.core.registry import Family
from larder.core.types import WeightChunk
from larder.ops.attention import sink_logits
from larder.ops.column_statistics import ColumnReducer, reduce_columns
from larder.ops.cpu.block_attention import largest_weights, supports
from larder.policy.aggregation.base import Aggregation
from larder.policy.aggregation.max import Max
from larder.policy.heads.base import HeadRule
from larder.policy.heads.group_max import GroupMax

AGGREGATIONS = Family("aggregation", "larder.policy.aggregation")
HEAD_RULES = Family("heads", "larder.policy.heads")
MIN_TAU = 0.05  # below it the power of an entropy leaves the range of a float


@dataclass(frozen=True)
class ObservationWindow:
    """Observation window: queries, and the entries that they attend to.

    Args:
        positions: true positions of the queries, for the causal mask; None where they are behind
            all entries and see all of them.
        before: only entries at earlier true positions are scored; None scores all.
    """

    queries: Float[Tensor, "H Q D"]
    entries: Entries
    positions: Int[Tensor, " Q"] | None = None
    before: int | None = None

    def is_own_pass(self, observation: Observation) -> bool:
        """True if this is the attention of the pass itself: its own queries over all entries."""
        return (
            self.entries is observation.entries
            and self.queries.shape == observation.queries.shape
            and self.queries.data_ptr() == observation.queries.data_ptr()
        )

    def scored_lengths(self) -> tuple[int, ...]:
        """Number of scored entries of each head: the first ones."""
        if self.before is None:
            return self.entries.lengths
        return self.entries.position_range(0, self.before).lengths


@dataclass(frozen=True)
class AttentionReduction:
    """Aggregation over queries, then a rule over the query heads that share a kv head."""

    aggregation: Aggregation
    heads: HeadRule

    @staticmethod
    def from_names(aggregation: str, heads: str) -> AttentionReduction:
        """Reduction of parts with default parameters."""
        return AttentionReduction(AGGREGATIONS.load(aggregation)(), HEAD_RULES.load(heads)())

    def reduce(
        self, window: ObservationWindow, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        """One number per entry and kv head; the full matrix of weights is never held."""
        entries, aggregation = window.entries, self.aggregation
        is_local = not (
            aggregation.depends_on_other_entries or aggregation.depends_on_visible_count
        )
        if observation.logits is not None and is_local and window.is_own_pass(observation):
            return self._reduce_recorded(observation.logits, entries, observation)
        if self._takes_kernel(window, observation):
            rows = window.queries, entries.keys, *entries.layout
            bias = entries.columns.get(LOG_COUNT)
            largest = largest_weights(*rows, observation.layer.scaling, bias)
            return list(torch.split(largest, list(entries.lengths)))
        is_global = aggregation.depends_on_other_entries
        scored = window.scored_lengths() if is_global else entries.lengths
        key_positions = None if window.positions is None else entries.packed_positions()
        statistics = reduce_columns(
            aggregation,
            window.queries,
            entries.keys,
            *entries.layout,
            observation.layer.scaling,
            query_positions=window.positions,
            key_positions=key_positions,
            bias=entries.columns.get(LOG_COUNT),
            judged=scored,
            softcap=observation.layer.softcap,
            sinks=sink_logits(observation.layer, entries.keys),
        )
        whole = [
            pad(head, (0, length - head.shape[-1]))
            for head, length in zip(statistics, entries.lengths, strict=True)
        ]
        joined = self.heads.join(whole, entries, observation)
        return [
            pad(aggregation.complete(head[:count]), (0, len(head) - count))
            for head, count in zip(joined, scored, strict=True)
        ]

    def _takes_kernel(self, window: ObservationWindow, observation: Observation) -> bool:
        """True if a kernel finds the largest weights of all heads in one call."""
        keys, layer = window.entries.keys, observation.layer
        return (
            type(self.aggregation) is Max  # subclasses fold otherwise
            and type(self.heads) is GroupMax
            and window.positions is None
            and layer.softcap is None
            and not layer.sinks
            and supports(window.queries, keys, keys)
        )

    def _reduce_recorded(
        self, logits: Float[Tensor, "R C"], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        """`reduce` of the logits of a single query that attention recorded: no second product."""
        from larder.ops.attention_weights import head_weights_from_logits  # decode steps only

        sinks = sink_logits(observation.layer, logits)
        weights = head_weights_from_logits(logits, *entries.layout, sinks)
        single = self.aggregation.single_query(weights)
        joined = self.heads.join_stored(single, entries, observation)
        return [self.aggregation.complete(head) for head in joined]


@dataclass(frozen=True)
class NoAggregation(Aggregation):
    """Null object for scorers that do not use attention."""

    def start(self, like: Float[Tensor, "R S"]) -> tuple[Tensor, ...]:
        return (like,)

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        del state, weights, first, total


@dataclass(frozen=True)
class NoHeadRule(HeadRule):
    """Null object for scorers that do not use attention."""

    def join(
        self, statistics: Sequence[Float[Tensor, "R _"]], entries: Entries, observation: Observation
    ) -> list[Float[Tensor, " _"]]:
        return [head[0] for head in statistics]


def gather_last_queries(
    gather: ColumnReducer, observation: Observation, window: int
) -> list[Float[Tensor, "N _"]]:
    """Statistics of the attention weights of the last `window` queries, for each kv head."""
    entries = observation.entries
    return reduce_columns(
        gather,
        observation.queries[:, -window:],
        entries.keys,
        *entries.layout,
        observation.layer.scaling,
        query_positions=observation.query_positions[-window:],
        key_positions=entries.packed_positions(),
        bias=entries.columns.get(LOG_COUNT),
        softcap=observation.layer.softcap,
        sinks=sink_logits(observation.layer, entries.keys),
    )


def sum_statistics(heads: Sequence[Float[Tensor, "N _"]], count: int) -> list[float]:
    """Sums of `count` statistics over entries and heads.

    Args:
        heads: for each kv head, the first statistic of all query heads, then the second, ...
    """
    sums = torch.stack([head.double().reshape(count, -1).sum(1) for head in heads]).sum(0)
    return [float(total) for total in sums]


def check_taus(name: str, *taus: float) -> None:
    """Validate the exponents `tau1`, `tau2`, ... of a part.

    Raises:
        BadParameter: one of them is out of range.
    """
    for number, tau in enumerate(taus, start=1):
        require(MIN_TAU <= tau < math.inf, f"{name}.tau{number}", f"at least {MIN_TAU}", tau)
