"""Softmax weights of each query over the cached entries of its kv head, by loops."""

from __future__ import annotations

from larder.core import Entries, Observation
from references.ops.softmax import NO_SINK, capped, shares, sink_of


def heads_of(observation: Observation) -> range:
    return range(observation.layer.kv_heads)


def positions_of(entries: Entries, head: int) -> list[int]:
    start, length = entries.starts[head], entries.lengths[head]
    return [int(entries.positions[start + s]) for s in range(length)]


def weights(
    observation: Observation, query_head: int, query: int, visible: list[bool]
) -> list[float]:
    """One query head's weights over the entries it may see; the others get nothing."""
    entries, group = (
        observation.entries,
        observation.layer.query_heads // observation.layer.kv_heads,
    )
    start = entries.starts[query_head // group]
    q = observation.queries[query_head, query].double()
    logits = [
        capped(
            float(q @ entries.keys[start + s].double()) * observation.layer.scaling,
            observation.layer.softcap,
        )
        for s in range(len(visible))
    ]
    shown = [logit if see else NO_SINK for logit, see in zip(logits, visible, strict=True)]
    return shares(shown, sink_of(observation.layer.sinks, query_head))


def group_of(observation: Observation, head: int) -> range:
    """The query heads that share a kv head."""
    group = observation.layer.query_heads // observation.layer.kv_heads
    return range(head * group, (head + 1) * group)


def highest(observation: Observation, head: int, visible: list[bool]) -> list[float]:
    """The highest weight that any query of the group gives each entry."""
    best = [0.0] * len(visible)
    if any(visible):
        for query_head in group_of(observation, head):
            for query in range(observation.queries.shape[1]):
                row = weights(observation, query_head, query, visible)
                best = [max(a, b) for a, b in zip(best, row, strict=True)]
    return best


def highest_in_plain_attention(
    observation: Observation, head: int, visible: list[bool]
) -> list[float]:
    """Highest weights where the pass's own tokens up to the query take their share."""
    best = [0.0] * len(visible)
    for query_head in group_of(observation, head):
        for query in range(observation.queries.shape[1]):
            row = plain_weights(observation, query_head, query, visible)
            best = [max(a, b) for a, b in zip(best, row, strict=True)]
    return best


def plain_weights(
    observation: Observation, query_head: int, query: int, visible: list[bool]
) -> list[float]:
    """One query head's weights over cached entries, beside the pass's own tokens."""
    entries = observation.entries
    head = query_head // (observation.layer.query_heads // observation.layer.kv_heads)
    q = observation.queries[query_head, query].double()
    at = int(observation.query_positions[query])
    positions = positions_of(entries, head)
    shown = [see and position <= at for see, position in zip(visible, positions, strict=True)]
    start, layer = entries.starts[head], observation.layer
    cached = [entries.keys[start + s] if see else None for s, see in enumerate(shown)]
    logits = [
        NO_SINK if key is None else capped(float(q @ key.double()) * layer.scaling, layer.softcap)
        for key in (*cached, *observation.keys[head, : query + 1])
    ]
    return shares(logits, sink_of(layer.sinks, query_head))[: len(cached)]
