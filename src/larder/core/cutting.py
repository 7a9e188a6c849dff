"""Cutting a length into parts of nearly the same size."""

from __future__ import annotations


def even_ranges(total: int, most: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) that cover `total` in as few parts of at most `most` as will do.

    Parts differ by one at most, the longer ones first: no short rest is judged by its few tokens.
    """
    if not total:
        return []
    count = -(-total // most)
    edges = [-(-total * number // count) for number in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))
