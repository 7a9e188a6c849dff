"""Caches of a session in memory: the contract, and the form of the prefix backend.

Tiers, persistence and session information know this contract alone; each session backend has a form
of its own (that of the chat backend is in `session_backend/chat_snapshot.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from larder.cache.sequence import SequenceCache
from larder.server.serving_policy import CacheOccupancy
from larder.session.caches import SessionCaches
from larder.session.chat_cache import ChatCache
from larder.session.routing import Router

if TYPE_CHECKING:
    from larder.server.session_state import SessionState

COPIES = 2  # of a cache while it is written or loaded: its state, and the blob


class ResidentCaches(ABC):
    """Caches of one session that are on the device or in host memory."""

    # True if one of several caches is on the device and the others stay in host memory.
    spans_tiers: ClassVar[bool]

    @property
    @abstractmethod
    def caches(self) -> SessionCaches:
        """All caches."""

    @property
    def chat_cache(self) -> ChatCache | None:
        """Caches with the log of a chat; None for other forms."""
        return None

    @property
    def router(self) -> Router | None:
        """Router among episodes; None without episodes."""
        return None

    @abstractmethod
    def stop_rebuild(self) -> None:
        """Drop what a rebuild in progress has built; the caches stay."""

    @property
    def rebuild_bytes(self) -> int:
        """Peak of live bytes on the device while caches were rebuilt; 0 for other forms."""
        return 0

    @property
    def moved_bytes(self) -> int:
        """Bytes of a move between the device and host memory, where moves are measured; else 0."""
        return 0

    @property
    @abstractmethod
    def idle_bytes(self) -> int:
        """Bytes between two turns, without slack."""

    @property
    @abstractmethod
    def write_bytes(self) -> int:
        """Host memory that writing them to the store takes, in addition to them."""

    @abstractmethod
    def occupancy(self, latest: CacheOccupancy) -> CacheOccupancy:
        """Occupancy of the cache that answers.

        Args:
            latest: its occupancy after the last turn.
        """

    @abstractmethod
    def contains(self, turns: int) -> bool:
        """True if they can be stored as the state after this number of completed turns."""

    @abstractmethod
    def record(self, session: SessionState) -> bytes | None:
        """State of the session that is stored beside them; None for none."""

    @abstractmethod
    def written_caches(self) -> Sequence[SequenceCache]:
        """Caches to write, which do not change until `SessionCaches.end_lending`."""

    @abstractmethod
    def active_cache(self) -> SequenceCache | None:
        """Cache whose entries are shown; None if it is not on the device."""

    @abstractmethod
    def num_tokens(self, read: int) -> int:
        """Tokens of the transcript that they have read; `read` of them by the shown cache."""


class PrefixCaches(ResidentCaches):
    """The only cache of a session of the prefix backend, on one tier as a whole."""

    spans_tiers = False

    def __init__(self, caches: SessionCaches) -> None:
        self._caches = caches

    @property
    def caches(self) -> SessionCaches:
        return self._caches

    def stop_rebuild(self) -> None:
        """No effect: the cache is never rebuilt beside itself."""

    @property
    def moved_bytes(self) -> int:
        return self._caches.nbytes

    @property
    def idle_bytes(self) -> int:
        active = self._caches.active_cache
        return 0 if active is None else active.idle_nbytes

    @property
    def write_bytes(self) -> int:
        return COPIES * self._caches.nbytes

    def occupancy(self, latest: CacheOccupancy) -> CacheOccupancy:
        [usage] = self._caches.usage()
        return CacheOccupancy(usage.entries, usage.next_position)

    def contains(self, turns: int) -> bool:
        return True

    def record(self, session: SessionState) -> None:
        del session

    def written_caches(self) -> Sequence[SequenceCache]:
        active = self._caches.active_cache
        # It does not change while it is written.
        return self._caches.lend_views() if active is None else (active,)

    def active_cache(self) -> SequenceCache:
        return self._caches.view(0)

    def num_tokens(self, read: int) -> int:
        return read
