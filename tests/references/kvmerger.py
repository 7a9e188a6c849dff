"""`kvmerger`: what is rejected joins the best kept entry of its run of similar keys."""

from __future__ import annotations

import math
from typing import Any

from larder.core.observation import Entries, Scored
from references.counted import mean, scores_of
from references.ops.nearest import cosine
from references.outcome import Outcome, key_of, untouched, value_of


def settle(part: Any, entries: Entries, scored: Scored, kept: list[list[int]]) -> Outcome:
    outcome = untouched(entries, kept)
    for head, own in enumerate(kept):
        held, scores = {e.kept: e for e in outcome.heads[head]}, scores_of(entries, scored, head)
        for run in runs(part, entries, head):
            stay, gone = [j for j in run if j in own], [s for s in run if s not in own]
            if not stay or not gone:
                continue
            pivot = max(stay, key=lambda j, by=scores: (by[j], -j))
            apart = [distance(entries, head, pivot, s) for s in gone]
            sigma = part.width * sum(apart) / len(apart)
            kernel = [math.exp(-((d / sigma) ** 2) / 2) if d else 1.0 for d in apart]
            members, weights = [pivot, *gone], [1.0, *kernel]
            held[pivot].key = mean([key_of(entries, head, s) for s in members], weights)
            held[pivot].value = mean([value_of(entries, head, s) for s in members], weights)
    return outcome


def runs(part: Any, entries: Entries, head: int) -> list[list[int]]:
    found: list[list[int]] = []
    for s in range(entries.lengths[head]):
        last = key_of(entries, head, s - 1) if s else []
        if s and cosine(last, key_of(entries, head, s)) >= part.threshold:
            found[-1].append(s)
        else:
            found.append([s])
    return found


def distance(entries: Entries, head: int, one: int, other: int) -> float:
    return math.dist(key_of(entries, head, one), key_of(entries, head, other))
