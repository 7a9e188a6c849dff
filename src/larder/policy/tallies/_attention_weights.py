"""Softmax weights of the queries of a pass, folded into running columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from larder.core.observation import Observation
from larder.core.part import LOG_COUNT
from larder.core.types import WeightChunk
from larder.ops.attention import sink_logits, sinks_by_group
from larder.ops.attention_weights import attention_weights, weights_from_logits
from larder.ops.column_statistics import GroupReduction, reduce_columns


@dataclass(frozen=True)
class QueryWeights:
    """Softmax weights of a few consecutive queries over the entries of their kv head.

    Args:
        weights: reduced over query heads; 0 where a query cannot see an entry.
        times: true positions of the queries.
        positions: true positions of the entries.
    """

    weights: Float[Tensor, "c S"]
    times: Int[Tensor, " c"]
    positions: Int[Tensor, " S"]

    @property
    def total(self) -> Float[Tensor, " S"]:
        """Sum over the queries."""
        return self.weights[0] if len(self.weights) == 1 else self.weights.sum(0)

    @property
    def sees(self) -> Bool[Tensor, "c S"]:
        """Causal mask: which query sees which entry."""
        return self.positions <= self.times[:, None]


# Step of a tally: new state of entries from the old one and the weights of a few queries; one
# number # per column and entry.
State = tuple[Tensor, ...]
Step = Callable[[State, QueryWeights], State]


def update_columns(
    observation: Observation, names: tuple[str, ...], group: GroupReduction, step: Step
) -> dict[str, Tensor]:
    """New values of columns [C] after a pass: `step` applied to its queries, a chunk at a time.

    Args:
        names: the columns, in the order of the state.
        group: reduction over the query heads that share a kv head.
    """
    old = tuple(observation.entries.columns[name] for name in names)
    alone = len(observation.query_positions) == 1
    new = (
        _update_single_query(observation, old, group, step)
        if alone
        else _update_queries(observation, old, group, step)
    )
    return dict(zip(names, new, strict=True))


def _update_single_query(
    observation: Observation, old: State, group: GroupReduction, step: Step
) -> State:
    """All heads at once; slack rows get weight 0."""
    weights = newest_query_weights(observation, group)
    return step(
        old, QueryWeights(weights[None], observation.query_positions, observation.entries.positions)
    )


def newest_query_weights(observation: Observation, group: GroupReduction) -> Float[Tensor, " C"]:
    """Weight of the newest query of a pass for every storage row."""
    entries = observation.entries
    sinks = sink_logits(observation.layer, entries.keys)
    if observation.logits is not None:
        return weights_from_logits(observation.logits, *entries.layout, group, sinks)
    bias = entries.columns.get(LOG_COUNT)
    starts, lengths = entries.layout
    return attention_weights(
        observation.queries[:, -1:],
        entries.keys,
        starts,
        lengths,
        observation.layer.scaling,
        group=group,
        bias=bias,
        softcap=observation.layer.softcap,
        sinks=sinks,
    )


def _update_queries(
    observation: Observation, old: State, group: GroupReduction, step: Step
) -> State:
    new = tuple(column.clone() for column in old)
    sinks = sinks_by_group(
        sink_logits(observation.layer, observation.entries.keys), observation.layer.kv_heads
    )
    for head, queries in enumerate(
        observation.queries.chunk(observation.layer.kv_heads)
    ):  # [R, Q, D] each
        rows = observation.entries.rows(head)
        keys = observation.entries.keys[rows]
        counts = observation.entries.columns.get(LOG_COUNT)
        positions = observation.entries.positions[rows]
        running = _ColumnGather(
            step, group, tuple(c[rows] for c in old), observation.query_positions, positions
        )
        [result] = reduce_columns(
            running,
            queries,
            keys,
            torch.tensor([0]),
            torch.tensor([len(keys)]),
            observation.layer.scaling,
            query_positions=observation.query_positions,
            key_positions=positions,
            bias=None if counts is None else counts[rows],
            softcap=observation.layer.softcap,
            sinks=sinks[head],
        )
        for column, numbers in zip(new, result, strict=True):
            column[rows] = numbers
    return new


@dataclass(frozen=True)
class _ColumnGather:
    """Column reducer with the state of one kv head: a row per column instead of per query head."""

    step: Step
    group: GroupReduction
    old: State
    times: Int[Tensor, " Q"]
    positions: Int[Tensor, " S"]

    def start(self, like: Float[Tensor, "R S"]) -> State:
        return tuple(column.clone() for column in self.old)

    def fold(self, state: State, weights: WeightChunk, first: int, total: int) -> None:
        count = weights.shape[1]
        joined = self.group.join(weights.flatten(1)).view(count, -1)
        votes = QueryWeights(joined, self.times[first : first + count], self.positions)
        for column, numbers in zip(state, self.step(state, votes), strict=True):
            column.copy_(numbers)

    def finish(self, state: State, total: int) -> Float[Tensor, "N S"]:
        return torch.stack(state)
