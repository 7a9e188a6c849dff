"""Disk space reclamation: eviction of saved caches; token logs of sessions stay.

An evicted cache is prefilled again from its tokens on access. A chunk is evicted after all chunks
that continue it, together with the caches of sessions that refer to it. Caches of pinned sessions
are evicted last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from larder.core.errors import LarderError
from larder.store.blobs.blob_store import BlobRef
from larder.store.blobs.tenant_blobs import TenantBlobs
from larder.store.eviction.base import Candidate, CandidateColumns, EvictionPolicy
from larder.store.fs.deadline import parallel_map
from larder.store.ledger import Tier
from larder.store.manifest import Manifest
from larder.store.prefix.chunk_index import ChunkIndex
from larder.store.prefix.chunk_records import PrefixChunk
from larder.store.sessions.epochs import SessionEpochs
from larder.store.sessions.records import Record, SessionKey

PINNED_FOREVER, NOT_PINNED = math.inf, -math.inf


@dataclass(frozen=True)
class _Victim:
    """Group of blobs that are evicted together.

    Args:
        refs: blobs that nothing else refers to.
        chunk: chunk to be removed from the index; None for a session's state.
    """

    tenant: str
    refs: tuple[BlobRef, ...]
    chunk: PrefixChunk | None = None


class DiskEviction:
    """Eviction of saved caches under a full disk budget. Safe from threads.

    Args:
        policy: eviction policy.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        manifest: Manifest,
        epochs: SessionEpochs,
        chunks: ChunkIndex,
        blobs: TenantBlobs,
    ) -> None:
        self._policy, self._manifest, self._epochs = policy, manifest, epochs
        self._chunks, self._blobs = chunks, blobs
        self._clock = 0.0
        self._clocks: dict[str, tuple[float, float]] = {}  # by name, at what last use
        blobs.make_room = self.make_room

    def make_room(self, tenant: str, count: int) -> None:
        """Evict caches until `count` bytes can be reserved for a tenant, or none are left.

        If all tenants together have room, only caches of this tenant are evicted, and of those that
        share its budget.
        """
        ledger = self._blobs.ledger
        wanted = count - ledger.free_bytes(Tier.DISK, tenant)
        if wanted <= 0 or count > ledger.limit(Tier.DISK):
            return
        is_own = ledger.limit(Tier.DISK) - ledger.used(Tier.DISK) >= count
        found = self._candidates(ledger.group_of(tenant) if is_own else None)
        columns = CandidateColumns.of([candidate for candidate, _ in found])
        order = self._policy.select_victims(columns, self._manifest.clock(), wanted)
        self._clock = max(self._clock, order.clock)
        for row in order.rows:
            self._evict(found[row][1])

    def _candidates(self, tenants: Collection[str] | None) -> list[tuple[Candidate, _Victim]]:
        """Chunks and caches of sessions; those of some tenants, or of all."""
        chunks, states = self._chunks.all(), self._states()
        pinned_records = [record for record, is_head, *_ in states if is_head and record.is_pinned]
        pinned = {ref.digest for record in pinned_records for ref in record.spans}
        found = [
            self._chunk_candidate(owner, chunk, last_used, uses, chunk.ref.digest in pinned)
            for owner, chunk, last_used, uses in chunks
        ]
        found += self._state_candidates(states, {chunk.ref.digest for _, chunk, *_ in chunks})
        names = {candidate.name for candidate, _ in found}
        self._clocks = {name: clock for name, clock in self._clocks.items() if name in names}
        return [pair for pair in found if tenants is None or pair[1].tenant in tenants]

    def _chunk_candidate(
        self, owner: str, chunk: PrefixChunk, last_used: float, uses: int, is_pinned: bool
    ) -> tuple[Candidate, _Victim]:
        name = f"chunk {chunk.row}"
        candidate = Candidate(
            name=name,
            bytes=chunk.ref.bytes,
            seconds=float(chunk.stop - chunk.start),
            last_used=last_used,
            uses=uses,
            clock=self._clock_of(name, last_used),
            pinned_until=PINNED_FOREVER if is_pinned else NOT_PINNED,
            parent=f"chunk {chunk.parent}" if chunk.parent else "",
        )
        return candidate, _Victim(owner, (chunk.ref,), chunk)

    def _state_candidates(
        self, states: Sequence[tuple[Record, bool, float, int]], chunk_digests: Collection[str]
    ) -> Iterator[tuple[Candidate, _Victim]]:
        """States with blobs of their own: of no chunk, no other session and no newer state of the
        session.

        Args:
            states: newest first.
        """
        uses_by_session = {(r.key, ref.digest) for r, *_ in states for ref in r.cache_refs}
        num_sessions = Counter(digest for _, digest in uses_by_session)
        taken = {*chunk_digests, *(digest for digest, count in num_sessions.items() if count > 1)}
        for record, is_head, last_used, uses in states:
            own = [ref for ref in dict.fromkeys(record.cache_refs) if ref.digest not in taken]
            if not own:
                continue
            taken |= {ref.digest for ref in own}
            name = f"state {record.session} {record.epoch}"
            candidate = Candidate(
                name=name,
                bytes=max(sum(ref.bytes for ref in own), 1),
                seconds=float(record.num_tokens),
                last_used=last_used,
                uses=uses,
                clock=self._clock_of(name, last_used),
                session=record.session,
                superseded=not is_head,
                pinned_until=PINNED_FOREVER if is_head and record.is_pinned else NOT_PINNED,
            )
            yield candidate, _Victim(record.tenant, tuple(own))

    def _clock_of(self, name: str, last_used: float) -> float:
        """Clock of the tier when a candidate was last used, as far as it was observed."""
        known = self._clocks.get(name)
        if known is None or known[0] != last_used:
            known = self._clocks[name] = last_used, self._clock
        return known[1]

    def _states(self) -> list[tuple[Record, bool, float, int]]:
        """Every stored state that has a cache, newest first: record, is newest, last use, uses."""
        with self._manifest.reading() as rows:
            found = rows(
                "SELECT tenant, session, epoch, epoch = head, last_used, uses "
                "FROM epochs JOIN sessions USING (tenant, session) ORDER BY epoch DESC"
            )
        states = []
        for tenant, session, epoch, is_head, last_used, uses in found:
            try:
                record = self._epochs.epoch(SessionKey(tenant, session), epoch)
            except LarderError:
                continue
            if record is not None and record.spans and not self._blobs.index.is_evicted(record):
                states.append((record, bool(is_head), last_used, uses))
        return states

    def _evict(self, victim: _Victim) -> None:
        dropped = list[PrefixChunk]()
        if victim.chunk is not None:
            dropped = self._chunks.drop(victim.chunk, victim.tenant)
        self._blobs.index.release(victim.refs)
        self._blobs.evict(victim.refs)
        # Chunks behind it that were saved since the candidates were listed.
        self._blobs.drop(chunk.ref for chunk in dropped if chunk.ref not in victim.refs)


class GarbageCollection:
    """Deletion of unreferenced states and chunks. Safe from threads and processes."""

    def __init__(self, chunks: ChunkIndex, blobs: TenantBlobs) -> None:
        self._chunks, self._blobs = chunks, blobs
        blobs.collect = self.unreferenced

    def states(self, dropped: Iterable[Record]) -> int:
        """Delete what only forgotten states referred to; return the bytes freed."""
        ordered = sorted(dropped, key=lambda record: record.tenant)
        freed = 0
        for tenant, records in groupby(ordered, key=lambda record: record.tenant):
            freed += self.unreferenced(tenant, [ref for each in records for ref in each.refs])
        return freed

    def unreferenced(self, tenant: str, refs: Collection[BlobRef]) -> int:
        """Delete those of some blobs that nothing needs; return the bytes freed.

        Prefix chunks of the blobs that no session refers to are removed from the index first,
        unless they are retained, or shared by another machine, or being saved.
        """
        refs = list(dict.fromkeys(refs))
        unused = self._chunks.unused(tenant, refs)
        free = parallel_map(lambda chunk: self._is_free(chunk, tenant), unused)
        unneeded = [c for c, is_free in zip(unused, free, strict=True) if is_free]
        self._chunks.remove_unreferenced(tenant, unneeded)
        return self._blobs.drop(r for r in refs if not self._blobs.index.is_referenced(r.digest))

    def sweep(self, needed: Collection[str], since: float) -> set[str]:
        """Delete chunks that no session of any machine refers to.

        Args:
            needed: digests that records refer to.
            since: chunks that were read or written since then may be about to be referenced.

        Returns:
            digests of chunks that are retained without a session, on any machine.
        """
        unused, kept = self._chunks.all_unused(since), self._chunks.retained()
        needed = {*needed, *self._blobs.pending_digests(since)}
        for tenant, chunks in unused.items():
            free = [c for c in chunks if c.ref.digest not in needed and (tenant, c.key) not in kept]
            self._chunks.remove_unreferenced(tenant, free)
        return {digest for digest in kept.values() if digest}

    def _is_free(self, chunk: PrefixChunk, tenant: str) -> bool:
        return not self._blobs.is_in_use(chunk.ref) and not self._chunks.is_retained(chunk, tenant)
