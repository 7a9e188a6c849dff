"""`drop`: nothing is done for the rejected."""

from __future__ import annotations


def settle(kept: list[int]) -> list[int]:
    return list(kept)
