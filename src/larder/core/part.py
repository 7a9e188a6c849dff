"""Requirements of policy parts: the inputs that a part has provided, and the state that the cache
holds for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

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


class PolicyPart:
    """Base of all policy parts, with the names of the inputs that a part reads.

    An input that depends on parameters is returned by the method instead.
    """

    # Names of the providers that it reads, files of `larder.policy.providers`.
    needs: ClassVar[frozenset[str]] = frozenset()
    # Names of the tallies whose columns it reads, files of `larder.policy.tallies`.
    tallies: ClassVar[frozenset[str]] = frozenset()
    # Names of the measurements of a model that it looks up, files of `larder.models.measurements`.
    calibrations: ClassVar[frozenset[str]] = frozenset()
    # State that the cache holds for it.
    ledger: ClassVar[Ledger] = Ledger()

    def required_providers(self) -> frozenset[str]:
        """Names of the providers that these parameters need."""
        return self.needs

    def required_tallies(self) -> frozenset[str]:
        """Names of the tallies that these parameters need."""
        return self.tallies

    def required_calibrations(self) -> frozenset[str]:
        """Names of the calibrations that these parameters need."""
        return self.calibrations

    def required_ledger(self) -> Ledger:
        """State that the cache holds for these parameters."""
        return self.ledger

    def observes_whole_text(self) -> bool:
        """True if it needs the queries of a whole context in one pass.

        `whole()` then reads a context in one block, however long it is.
        """
        return False
