"""`merge_values`: each rejected value joins the kept entry of the most similar key."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Entries, LayerScores
from references.counted import mean
from references.ops.nearest import cosine
from references.outcome import Outcome, key_of, untouched, value_of

SMALL = {"threshold": 0.1}  # parameters for small layers


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    outcome = untouched(entries, kept)
    for head, count in enumerate(entries.lengths):
        members: dict[int, list[tuple[float, list[float]]]] = {}
        for s in range(count):
            if s in kept[head] or not kept[head]:
                continue
            key, value = key_of(entries, head, s), value_of(entries, head, s)
            u, j = max(
                ((cosine(key, key_of(entries, head, j)), j) for j in kept[head]),
                key=lambda pair: pair[0],
            )
            if u < part.threshold or u <= 0:
                continue
            own, other = length(value), length(value_of(entries, head, j))
            members.setdefault(j, []).append((u * own / (own + other), value))
        for entry in outcome.heads[head]:
            joined = members.get(entry.kept, [])
            if joined:
                rows = [value_of(entries, head, entry.kept), *(value for _, value in joined)]
                entry.value = mean(rows, [1.0, *(weight for weight, _ in joined)])
    return outcome


def length(vector: list[float]) -> float:
    return math.sqrt(sum(x * x for x in vector))
