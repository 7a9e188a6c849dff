"""Columns, scalars and queries that a policy has the cache hold besides keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Column with ln n for an entry that represents n merged tokens; attention adds it to the entry's
# logit, so that the entry weighs as much as n equal ones.
LOG_COUNT = "log_count"


@dataclass(frozen=True)
class Ledger:
    """Policy state of a managed layer: named float32 columns and scalars, and latest queries.

    The cache stores it, saves it and counts its bytes.

    Args:
        columns: one number per entry; 0 for a new one.
        scalars: one number per kv head; NaN until it is first written.
        queries: number of latest queries to hold.
    """

    columns: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    queries: int = 0

    @staticmethod
    def union(ledgers: Iterable[Ledger]) -> Ledger:
        """Union of several ledgers: each name once, in alphabetical order."""
        parts = list(ledgers)
        columns = sorted({name for ledger in parts for name in ledger.columns})
        scalars = sorted({name for ledger in parts for name in ledger.scalars})
        queries = max((ledger.queries for ledger in parts), default=0)
        return Ledger(tuple(columns), tuple(scalars), queries)
