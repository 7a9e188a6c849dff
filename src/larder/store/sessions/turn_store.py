"""Sessions appended turn by turn, with caches attached later.

A turn is small and written at once; the cache that was saved last stays with the session, though it
has not read that turn. A cache is written in two steps: its blobs, which takes long, and then the
record that refers to them, as the epoch after the session's newest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from larder.core.errors import Damaged, LarderError, Refused
from larder.store.blobs.payloads import add_owner, encode_token_log
from larder.store.blobs.tenant_blobs import BlobTransaction
from larder.store.components import StoreComponents
from larder.store.manifest import superseded_error
from larder.store.prefix import chunk_index
from larder.store.prefix.chunk_records import prefix_digest
from larder.store.sessions.cache_io import CacheBlobs, CacheSnapshot, check_snapshot, is_shareable
from larder.store.sessions.records import Record, session_key

NO_LABELS: Mapping[str, str] = {}


@dataclass(frozen=True)
class SessionTurn:
    """Session with its newest turn.

    Args:
        ids: every token of the conversation.
        transcript: text of the conversation.
        labels: as in `Record`.
    """

    ids: Sequence[int]
    transcript: bytes
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StagedCache:
    """Cache whose blobs are written and pinned for a while.

    Args:
        ids: that it has read.
        saving: of the blobs.
    """

    ids: tuple[int, ...]
    snapshot: CacheSnapshot
    written: CacheBlobs
    saving: BlobTransaction


class TurnStore:
    """Sessions of all tenants, in the format of `SessionStore`. Safe from threads and processes."""

    def __init__(self, parts: StoreComponents) -> None:
        self._parts = parts

    def append(self, principal: str, name: str, turn: SessionTurn, expected: int) -> Record:
        """Append a turn as the newest state, keeping the cache that was saved last.

        Args:
            expected: the epoch that it follows; 0 for a new session. The same again is one turn.

        Raises:
            InputError: the session is new, and none may be called so.
            Superseded: another state is the newest.
            BudgetError, StoreError: it cannot be kept; what was saved before is untouched.
        """
        parts, (tenant, session) = self._parts, self._keys(principal, name)
        newest = parts.heads.newest(tenant, session)
        is_new = not expected and (newest is None or newest.removed)
        expected = parts.heads.before(tenant, newest, expected)
        with parts.blobs.reserve_metadata(), parts.blobs.saving(tenant) as saving:
            record = Record(
                tenant,
                session,
                name,
                expected + 1,
                tokens=saving.put(encode_token_log(turn.ids, tenant, session)),
                num_tokens=len(turn.ids),
                previous=expected,
                transcript=saving.put(add_owner(turn.transcript, tenant, session)),
                made=parts.clock(),
                labels=dict(turn.labels),
            )
            if newest is not None and _is_retry(record, newest):
                return newest
            if newest is not None and self._cache_covers(newest, turn.ids):
                count, prefix = (
                    newest.num_cached_tokens,
                    prefix_digest(turn.ids[: newest.num_cached_tokens]),
                )
                record = record.replace_cache(newest)
                record = replace(record, cache_tokens=count, cache_prefix=prefix)
            if is_new:
                parts.branches.note(record)
            with saving.commit_record():
                return self._parts.commit(record, is_new)

    @contextmanager
    def stage(
        self, principal: str, ids: Sequence[int], snapshot: CacheSnapshot
    ) -> Iterator[StagedCache]:
        """Context in which the blobs of a cache are written and pinned; unreferenced ones go after
        it.

        Args:
            ids: that it has read.

        Raises:
            BudgetError, StoreError: they cannot be kept.
        """
        check_snapshot(ids, snapshot)
        tenant, shelves = self._parts.tenant(principal), self._parts.blobs
        chunks = len(ids) // chunk_index.CHUNK_TOKENS if is_shareable(snapshot) else 0
        with shelves.saving(tenant) as saving:
            with shelves.reserve_metadata(chunks):
                written = self._parts.writer.snapshot(saving, tenant, ids, snapshot)
            yield StagedCache(tuple(ids), snapshot, written, saving)

    def attach(
        self,
        principal: str,
        name: str,
        prepared: StagedCache,
        expected: int,
        labels: Mapping[str, str] = NO_LABELS,
    ) -> Record:
        """Attach a staged cache to a session whose text begins with the tokens it has read.

        Args:
            expected: the epoch of the session.
            labels: in addition to those that the session has.

        Raises:
            Refused: there is no such session, or its text is another one.
            Superseded: another state is the newest.
            BudgetError, StoreError: the record cannot be kept.
        """
        parts, own = self._parts, self._keys(principal, name)
        head = parts.heads.head(*own)
        if head is None:
            raise Refused(f"Session {name!r} no longer exists.", "gone")
        count = len(prepared.ids)
        if self._ids(head)[:count] != prepared.ids:
            raise Refused("The text does not begin as the cache does.", "tokens")
        written, snapshot = prepared.written, prepared.snapshot
        record = replace(
            head,
            epoch=expected + 1,
            previous=expected,
            made=parts.clock(),
            identity=snapshot.identity.told(),
            policy=snapshot.policy,
            codec=snapshot.codec,
            cache=snapshot.cache.meta(),
            spans=written.spans,
            cache_bytes=written.cache_bytes,
            lossless=written.lossless,
            others=written.others,
            beside=written.beside,
            cache_tokens=count,
            cache_prefix=prefix_digest(prepared.ids),
            labels={**head.labels, **labels},
        )
        with parts.blobs.reserve_metadata(), prepared.saving.commit_record():
            return self._parts.commit(record)

    def label(self, principal: str, name: str, labels: Mapping[str, str], expected: int) -> Record:
        """Add labels to a session.

        Its state is the same, made when it was: the one without them is dropped, which takes the
        place of none that can be gone back to.

        Raises:
            Refused: there is no such session.
            Superseded: another state than `expected` is the newest.
            BudgetError, StoreError: the record cannot be kept.
        """
        parts, head = self._parts, self._parts.heads.head(*self._keys(principal, name))
        if head is None:
            raise Refused(f"Session {name!r} no longer exists.", "gone")
        if head.epoch != expected:
            raise superseded_error(name, expected, head.epoch)
        if labels.items() <= head.labels.items():
            return head
        own = {"epoch": expected + 1, "previous": expected}
        labeled = replace(head, **own, labels={**head.labels, **labels})
        with parts.blobs.reserve_metadata():
            parts.heads.relabel(labeled)
        return labeled

    def newest(self, principal: str, name: str) -> tuple[Record, bytes] | None:
        """Newest state of a session and its transcript, without a cache; None if there is none.

        Raises:
            Damaged: its text, or every record of it, is not what was written.
            Refused: it cannot be read for another reason, named in the error.
        """
        parts = self._parts
        try:
            record = parts.heads.head(*self._keys(principal, name))
            if record is None or record.transcript is None:
                return None
            return record, parts.reader.transcript(record)
        except Damaged as error:
            parts.refusals.note_error(error)
            raise
        except LarderError as error:
            reason = parts.refusals.note_error(error)
            raise Refused(f"Session {name!r} cannot be read: {error}", reason) from error

    def restart_epoch(self, principal: str, name: str) -> int:
        """Epoch that a new beginning of a damaged session follows; 0 if it is intact or missing.

        If every record is damaged, the session is removed, so that its name is free.
        """
        parts, own = self._parts, self._keys(principal, name)
        try:
            record = parts.heads.head(*own)
        except Damaged:
            parts.heads.remove_damaged(*own, name, parts.clock())
            return 0
        if record is None or record.transcript is None:
            return 0
        try:
            parts.reader.transcript(record)
        except Damaged:
            return record.epoch
        return 0

    def head(self, principal: str, name: str) -> Record | None:
        """Record of a session's newest state; None if there is none.

        Raises:
            StoreError: the disk fails.
        """
        return self._parts.heads.head(*self._keys(principal, name))

    def has_cache(self, record: Record) -> bool:
        """True if a session has a cache that was not evicted."""
        return bool(record.spans) and not self._parts.blobs.index.is_evicted(record)

    def of(self, principal: str) -> list[Record]:
        """Newest state of each session of one principal, most recently used first.

        Read from the local index: sessions of other machines appear after their first access.
        """
        return self._parts.heads.of(self._parts.tenant(principal))

    def branches(self, principal: str, root: str) -> list[str]:
        """Names of sessions whose label `ROOT_LABEL` names this one, on any machine, oldest
        first.
        """
        return self._parts.branches.of(self._parts.tenant(principal), root)

    def merge(self, principal: str, name: str) -> int:
        """Keep only the newest state of a session; return the bytes freed."""
        parts = self._parts
        dropped = parts.heads.prune(*self._keys(principal, name), keep=1)
        freed = parts.garbage.states(dropped)
        parts.blobs.settle()
        return freed

    def _keys(self, principal: str, name: str) -> tuple[str, str]:
        tenant = self._parts.tenant(principal)
        return tenant, session_key(tenant, name)

    def _cache_covers(self, record: Record, ids: Sequence[int]) -> bool:
        """True if a record's cache is present and covers the beginning of a text."""
        count = record.num_cached_tokens
        if record.removed or not 0 < count <= len(ids) or not self.has_cache(record):
            return False
        if record.cache_prefix:
            return record.cache_prefix == prefix_digest(ids[:count])
        try:
            return self._ids(record)[:count] == tuple(ids[:count])
        except (Damaged, Refused) as error:
            self._parts.refusals.note_error(error)
            return False

    def _ids(self, record: Record) -> tuple[int, ...]:
        return self._parts.reader.ids(record)


def _is_retry(record: Record, newest: Record) -> bool:
    """True if this turn was written before by a writer that did not receive the reply."""
    told = (record.epoch, record.tokens, record.transcript)
    return told == (newest.epoch, newest.tokens, newest.transcript)
