"""`group_sum`: the query heads of a kv head add up."""

from __future__ import annotations

from typing import Any


def joined(
    part: Any, statistics: list[list[list[float]]], positions: list[list[int]]
) -> list[list[float]]:
    """One number per kv head and entry from one per kv head, query head and entry."""
    return [[sum(column) for column in zip(*group, strict=True)] for group in statistics]
