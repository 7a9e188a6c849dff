"""What goes with states of sessions that are dropped: their blobs, and chunks of theirs.

A chunk goes once no session is made of it and no chunk continues it, unless it is kept for its own
sake. Another machine may have sessions that are made of it as well, and says so beside what is told
of it: then it goes at a sweep, which reads what all of them have written. So do chunks that this
machine has only read, or learned of, and those that a crash has left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby

from larder.store.at_once import parallel_map
from larder.store.blobs.budgeted_blobs import BudgetedBlobs
from larder.store.prefix.chunk_index import ChunkIndex
from larder.store.prefix.chunk_records import PrefixChunk
from larder.store.sessions.records import Record


class GarbageCollection:
    """Safe from threads and processes."""

    def __init__(self, chunks: ChunkIndex, shelves: BudgetedBlobs) -> None:
        self._chunks, self._shelves = chunks, shelves

    def states(self, dropped: Iterable[Record]) -> int:
        """Delete what nothing needs any more of states that the index has forgotten; the bytes that
        are freed."""
        told = sorted(dropped, key=lambda record: record.tenant)
        freed = 0
        for tenant, records in groupby(told, key=lambda record: record.tenant):
            refs = list(dict.fromkeys(ref for record in records for ref in record.refs))
            unused = self._chunks.unused(tenant, refs)
            free = parallel_map(lambda chunk, tenant=tenant: self._is_free(chunk, tenant), unused)
            self._chunks.leave(tenant, (c for c, goes in zip(unused, free, strict=True) if goes))
            freed += self._shelves.drop(refs)
        return freed

    def sweep(self, needed: Collection[str], since: float) -> set[str]:
        """Forget chunks that no session is made of any more, of whichever machine.

        Args:
            needed: digests that records name.
            since: who has read a chunk, or put its blob, since then may be about to name it.

        Returns:
            digests of chunks that are kept for their own sake, of whichever machine.
        """
        unused, kept = self._chunks.all_unused(since), self._chunks.kept()
        needed = {*needed, *self._shelves.in_making(since)}
        for tenant, chunks in unused.items():
            free = [c for c in chunks if c.ref.digest not in needed and (tenant, c.key) not in kept]
            self._chunks.leave(tenant, free)
        return {digest for digest in kept.values() if digest}

    def _is_free(self, chunk: PrefixChunk, tenant: str) -> bool:
        return not self._shelves.is_wanted(chunk.ref) and not self._chunks.stays(chunk, tenant)
