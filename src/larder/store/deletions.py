"""Blobs on their way out.

A blob is called by its content, so one that is written anew has the name of the one that is being
deleted; and a deletion that hangs may come about at any time. Until it is over nobody takes the
blob for there, and nobody writes it: the index says so, to other processes as well. It is not held
meanwhile, and others go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from larder.core.errors import StoreError, StoreSlow
from larder.store.blobs.blob_index import DELETION_LEASE_SECONDS, BlobIndex
from larder.store.blobs.blob_store import BlobStore

POLL_SECONDS = 0.01  # between two looks whether a deletion is over


@dataclass
class _Deletion:
    """A deletion that is under way.

    Args:
        noted: what the index knows it by.
        over: set once it is, be it long after its time limit.
        is_left: nobody waits for it any more.
    """

    digest: str
    noted: float
    over: threading.Event = field(default_factory=threading.Event)
    is_left: bool = False


@dataclass(frozen=True)
class DeletionResult:
    """What became of a blob.

    Args:
        freed: bytes of what lay there.
        is_aside: nothing did, but a damaged one lies out of the way.
        kept: in whose name the index had it, and its bytes; None where no process of this machine
            has put it.
    """

    freed: int
    is_aside: bool
    kept: tuple[str, int] | None


class PendingDeletions:
    """Carries out what the index was told of. Safe from threads.

    Args:
        seconds: to wait for a deletion by somebody else.
    """

    def __init__(
        self, blobs: BlobStore, holdings: BlobIndex, clock: Callable[[], float], seconds: float
    ) -> None:
        self._blobs, self._holdings = blobs, holdings
        self._clock, self._seconds = clock, seconds
        self._lock = threading.Lock()
        self._under_way: list[_Deletion] = []

    def delete(self, digest: str, noted: float) -> DeletionResult:
        """Delete a blob, and tell the index when that is over.

        Args:
            noted: when the index was told that it is about to go.

        Raises:
            StoreError: the disk fails, or takes too long; then the blob may go later.
        """
        one = _Deletion(digest, noted)
        with self._lock:
            self._under_way.append(one)
        try:
            freed, is_aside = self._blobs.delete(digest, one.over.set)
            with self._lock:
                kept = self._holdings.gone(digest, one.noted)
                self._under_way.remove(one)
        except BaseException:
            one.is_left = True
            with suppress(StoreError):  # it is told later
                self.settle()
            raise
        return DeletionResult(freed, is_aside, kept)

    def settle(self) -> None:
        """Tell the index of deletions that have ended since, and of those that still have not."""
        with self._lock:
            for one in [*self._under_way]:
                now = self._clock()
                if one.is_left and one.over.is_set():
                    self._holdings.remains(one.digest, one.noted)
                    self._under_way.remove(one)
                elif one.noted <= now - DELETION_LEASE_SECONDS / 2:
                    self._holdings.still_leaves(one.digest, one.noted, now)
                    one.noted = now

    def await_end(self, digest: str, is_over: Callable[[str], bool]) -> None:
        """Wait until a blob is not being deleted, by whomever.

        Raises:
            StoreSlow: it still is.
        """
        until = time.monotonic() + self._seconds
        while not is_over(digest):
            if time.monotonic() > until:
                raise StoreSlow(
                    f"Blob {digest[:12]} was being deleted for {self._seconds:g} s, and cannot be "
                    "written before that is over: try again, and see whether the disk is well."
                )
            time.sleep(POLL_SECONDS)
