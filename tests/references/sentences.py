"""Sentences in plain Python: their mean keys, the mean query, and what is taken in which order."""

from __future__ import annotations

from collections.abc import Sequence

from references.lloyd import Vector, dot, mean


def ranked(
    queries: Sequence[Vector], keys: Sequence[Vector], numbers: Sequence[float]
) -> list[int]:
    """All entries of a kv head: those of the best sentence first, each sentence in order.

    Args:
        queries: one per query head of the kv head, each the mean of its sentence so far.
        numbers: of the sentence of each entry, below 0 at its end.
    """
    sentences = sorted({abs(number) for number in numbers})
    members = {s: [n for n, number in enumerate(numbers) if abs(number) == s] for s in sentences}
    score = {
        s: sum(dot(query, mean([keys[n] for n in own])) for query in queries)
        for s, own in members.items()
    }
    order = sorted(sentences, key=lambda s: -score[s])
    return [entry for s in order for entry in members[s]]


def products(queries: Sequence[Vector], keys: Sequence[Vector]) -> list[float]:
    """Of every entry, the sum of its products with the queries of the group."""
    return [sum(dot(query, key) for query in queries) for key in keys]


def asked(steps: Sequence[Vector], ends: Sequence[bool], at: int) -> tuple[list[float], bool]:
    """The mean query at a step, and whether it attends to everything.

    Args:
        steps: the query of each step.
        ends: whether the token of each step ends a sentence.
    """
    first = at
    while first > 0 and not ends[first - 1]:
        first -= 1
    return mean(steps[first : at + 1]), first == at
