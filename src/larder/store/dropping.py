"""What goes with states of sessions that are dropped: their blobs, and chunks of theirs.

A chunk goes once no session is made of it and no chunk continues it. Another machine may have
sessions that are made of it as well, and says so beside what is told of it: then it goes at a
sweep, which reads what all of them have written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from larder.store.blobs import Ref
from larder.store.chunk_notes import Chunk
from larder.store.chunks import Chunks
from larder.store.records import Record
from larder.store.shelves import Shelves


class Dropping:
    """Safe from threads and processes."""

    def __init__(self, chunks: Chunks, shelves: Shelves) -> None:
        self._chunks, self._shelves = chunks, shelves

    def states(self, dropped: Iterable[Record]) -> int:
        """Delete what nothing needs any more of states that the index has forgotten; the bytes that
        are freed."""
        told = sorted(dropped, key=lambda record: record.tenant)
        freed = 0
        for tenant, records in groupby(told, key=lambda record: record.tenant):
            refs = list(dict.fromkeys(ref for record in records for ref in record.refs))
            self._leave(tenant, self._chunks.unused(tenant, refs))
            freed += self._shelves.drop(refs)
        return freed

    def sweep(self, needed: Collection[str], since: float) -> None:
        """Forget chunks that no session is made of any more, of whichever machine.

        Args:
            needed: digests that records name.
            since: who has put a blob since then may be about to name it.
        """
        needed = {*needed, *self._shelves.in_making(since)}
        for tenant, chunks in self._chunks.all_unused().items():
            self._leave(tenant, [c for c in chunks if c.ref.digest not in needed], is_sole=True)

    def _leave(self, tenant: str, chunks: Sequence[Chunk], is_sole: bool = False) -> None:
        """Forget chunks, those behind others first, unless they are wanted."""
        for chunk in sorted(chunks, key=lambda chunk: -chunk.start):
            if is_sole or (self._is_free(chunk.ref) and not self._chunks.is_shared(chunk, tenant)):
                self._chunks.leave(chunk, tenant)

    def _is_free(self, ref: Ref) -> bool:
        return not self._shelves.is_wanted(ref)
