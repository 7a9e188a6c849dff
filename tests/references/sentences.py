"""Sentences in plain Python: where they are cut, and their mean keys."""

from __future__ import annotations

from collections.abc import Sequence

from references.lloyd import Vector, dot, mean


def cut(numbers: Sequence[float], page: int) -> list[list[int]]:
    """Entries of each page: entries that follow each other in one sentence, `page` at most."""
    pages: list[list[int]] = []
    for entry, number in enumerate(numbers):
        new = not pages or abs(numbers[entry - 1]) != abs(number) or len(pages[-1]) == page
        if new:
            pages.append([])
        pages[-1].append(entry)
    return pages


def scores(query: Vector, keys: Sequence[Vector], pages: Sequence[Sequence[int]]) -> list[float]:
    return [dot(query, mean([keys[entry] for entry in page])) for page in pages]


def bests(query: Vector, keys: Sequence[Vector], pages: Sequence[Sequence[int]]) -> list[float]:
    return [max(dot(query, keys[entry]) for entry in page) for page in pages]
