"""What the slow tiers of one sequence may take of host memory together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from weakref import WeakSet

from larder.core.errors import BudgetError

KIB, MIB = 1 << 10, 1 << 20
MEMINFO_PATH = "/proc/meminfo"


class HostMemoryUser(ABC):
    """Who takes host memory."""

    @property
    @abstractmethod
    def host_nbytes(self) -> int:
        """Bytes of it that are taken: of what is parked, and of what finds it again."""


class HostMemoryBudget:
    """Adds up what is taken, and refuses more.

    Args:
        limit: bytes; None for what the machine has.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._guests: WeakSet[HostMemoryUser] = WeakSet()

    def join(self, guest: HostMemoryUser) -> None:
        """Count what one more takes."""
        self._guests.add(guest)

    @property
    def taken(self) -> int:
        """Bytes that are taken now."""
        return sum(guest.host_nbytes for guest in self._guests)

    def check(self, entries: int, index: int = 0, beside: int = 0) -> None:
        """See that so much more may be taken.

        Args:
            entries: bytes that storage is to grow by.
            index: bytes that what finds entries will grow by, about.
            beside: bytes that are held twice meanwhile.

        Raises:
            BudgetError: it may not, or the machine has no such memory.
        """
        if self.limit is not None:
            self._check_limit(self.limit, self.taken + entries, index)
        free = _available_bytes() if entries else None
        needed = entries + index + beside
        if free is not None and needed > free:
            raise BudgetError(
                f"Parking entries needs {needed / MIB:.1f} MiB of host memory for a moment, but "
                f"{free / MIB:.1f} MiB are available: read less, or drop entries."
            )

    def _check_limit(self, limit: int, entries: int, index: int) -> None:
        if entries + index > limit:
            raise BudgetError(
                f"Parked entries and the index over them would take "
                f"{(entries + index) / MIB:.1f} MiB of host memory, more than the "
                f"{limit / MIB:.1f} MiB allowed: raise park(host_mib), hold them in few bits as "
                "quantized() does, or drop entries instead."
            )


def _available_bytes() -> int | None:
    """Memory that the machine can give without swapping; None where it does not say."""
    try:
        with open(MEMINFO_PATH, encoding="ascii") as lines:
            told = dict(line.split(":", 1) for line in lines)
        return int(told["MemAvailable"].split()[0]) * KIB
    except (OSError, KeyError, ValueError):
        return None
