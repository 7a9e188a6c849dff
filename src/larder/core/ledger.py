"""What a policy asks a cache to remember besides keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# A column of this name holds ln n where an entry stands for n tokens; attention adds it to the
# entry's logit, so that the entry weighs as much as n equal ones.
LOG_COUNT = "log_count"
# A column of this name holds -log p of the token given all before it, in nats: how surprising it
# was when it was read. Whoever reads tokens fills it.
SURPRISE = "surprise"


@dataclass(frozen=True)
class Ledger:
    """What a managed layer holds, saves and counts: float32 numbers by name, and queries.

    Args:
        columns: one number per entry; 0 for a new one.
        scalars: one number per kv head; NaN until it is first written.
        queries: how many of the latest queries.
    """

    columns: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    queries: int = 0

    @staticmethod
    def union(ledgers: Iterable[Ledger]) -> Ledger:
        """Everything that any of several parts asks for: each name once, in alphabetical order."""
        held = list(ledgers)
        columns = sorted({name for ledger in held for name in ledger.columns})
        scalars = sorted({name for ledger in held for name in ledger.scalars})
        queries = max((ledger.queries for ledger in held), default=0)
        return Ledger(tuple(columns), tuple(scalars), queries)
