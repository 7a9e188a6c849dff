"""Host memory budget that the slow tiers of one sequence share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from weakref import WeakSet

from larder.core.errors import BudgetError

KIB, MIB = 1 << 10, 1 << 20
MEMINFO_PATH = "/proc/meminfo"


class HostMemoryUser(ABC):
    """Owner of host memory that a `HostMemoryBudget` counts."""

    @property
    @abstractmethod
    def host_nbytes(self) -> int:
        """Bytes of host memory in use: offloaded entries and their index."""


class HostMemoryBudget:
    """Limit on the host memory of all registered users.

    Args:
        limit: bytes; None for what the machine has.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._users: WeakSet[HostMemoryUser] = WeakSet()

    def join(self, user: HostMemoryUser) -> None:
        """Register a user, by weak reference."""
        self._users.add(user)

    @property
    def used(self) -> int:
        """Bytes in use by all users."""
        return sum(user.host_nbytes for user in self._users)

    def check(self, entries: int, index: int = 0, beside: int = 0) -> None:
        """Check that memory may grow.

        Args:
            entries: bytes by which storage is to grow.
            index: estimated bytes by which the index will grow.
            beside: bytes that are held twice during the change.

        Raises:
            BudgetError: the limit or the machine's free memory would be exceeded.
        """
        if self.limit is not None:
            self._check_limit(self.limit, self.used + entries, index)
        free = _available_bytes() if entries else None
        needed = entries + index + beside
        if free is not None and needed > free:
            raise BudgetError(
                f"Offloading entries needs {needed / MIB:.1f} MiB of host memory, but only "
                f"{free / MIB:.1f} MiB are available: read a shorter text, or drop entries."
            )

    def _check_limit(self, limit: int, entries: int, index: int) -> None:
        if entries + index > limit:
            raise BudgetError(
                f"Offloaded entries and their index would take "
                f"{(entries + index) / MIB:.1f} MiB of host memory, more than the "
                f"{limit / MIB:.1f} MiB allowed: raise park(host_mib), quantize them with "
                "quantized(), or drop entries instead."
            )


def _available_bytes() -> int | None:
    """Memory available without swapping; None where the system does not report it."""
    try:
        with open(MEMINFO_PATH, encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * KIB
    except (OSError, KeyError, ValueError):
        return None
