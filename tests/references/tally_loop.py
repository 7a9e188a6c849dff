"""Attention that every entry got from every query since it was appended, one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from larder.core import LOG_COUNT, Observation
from references.attention_loop import group_of, positions_of
from references.ops.softmax import capped, sink_of


@dataclass
class AttentionRecord:
    """The weights of the query heads that share a kv head, query by query.

    Args:
        place: true position of the entry.
        first: where the tokens began that were read in one go with it, or before them without a
            gap that the head has by now.
        times: true positions of the queries that saw it.
        weights: one list per query, one weight per query head.
    """

    place: int
    first: int = 0
    times: list[int] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)


class AttentionHistory:
    """Attention of every observed pass, by entry of each head since it was appended."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, int], AttentionRecord] = {}

    def observe(self, observation: Observation) -> None:
        for head in range(observation.layer.kv_heads):
            held, first = (
                positions_of(observation.entries, head),
                int(observation.query_positions[0]),
            )
            if first - 1 in held:
                first = self.records[head, first - 1].first
            for place in held:
                self.records.setdefault((head, place), AttentionRecord(place, first))
            for query in range(len(observation.query_positions)):
                self._observe_query(observation, head, query)

    def _observe_query(self, observation: Observation, head: int, query: int) -> None:
        time = int(observation.query_positions[query])
        rows = [
            row_of(observation, query_head, query) for query_head in group_of(observation, head)
        ]
        for s, place in enumerate(positions_of(observation.entries, head)):
            if place <= time:
                record = self.records[head, place]
                record.times.append(time)
                record.weights.append([row[s] for row in rows])


def row_of(observation: Observation, query_head: int, query: int) -> list[float]:
    """Softmax weights of one query head, an entry of n tokens counting n times."""
    entries = observation.entries
    head = query_head // (observation.layer.query_heads // observation.layer.kv_heads)
    counts, own = entries.columns.get(LOG_COUNT), entries.rows(head)
    logits = entries.keys[own].double() @ observation.queries[query_head, query].double()
    parts = []
    for s, place in enumerate(positions_of(entries, head)):
        times = 1.0 if counts is None else math.exp(float(counts[own.start + s]))
        sees = place <= int(observation.query_positions[query])
        logit = capped(float(logits[s]) * observation.layer.scaling, observation.layer.softcap)
        parts.append(times * math.exp(logit) if sees else 0.0)
    total = sum(parts) + math.exp(sink_of(observation.layer.sinks, query_head))
    return [part / total for part in parts]
