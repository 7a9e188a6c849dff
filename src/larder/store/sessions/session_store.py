"""Session store: the one API over sessions, their turns, transcripts and caches.

A session is a sequence of states. `save` writes a whole state; `append` writes a turn at once and
keeps the cache that was saved last, and `stage` and `attach` add a newer cache later. A damaged or
unsuitable cache does not lose its session: the token log is a blob of its own, and the text is
prefilled again. The reason is logged and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from larder.core.errors import BudgetError, Damaged, InputError, LarderError, Refused, StoreError
from larder.store.blobs.payloads import add_owner, encode_token_log
from larder.store.blobs.tenant_blobs import BlobTransaction
from larder.store.components import StoreComponents
from larder.store.manifest import superseded_error
from larder.store.prefix.chunk_records import prefix_digest
from larder.store.sessions.cache_writer import CacheSnapshot, StagedCache, check_snapshot
from larder.store.sessions.export import export_session, import_session
from larder.store.sessions.records import (
    NO,
    PINNED_LABEL,
    ROOT_LABEL,
    Record,
    SessionKey,
    SessionTurn,
)
from larder.store.sessions.session_loader import (
    cache_covers,
    has_cache,
    load_session,
    load_transcript,
)
from larder.store.sessions.session_reader import CacheRequirements, LoadedSession

NO_LABELS: Mapping[str, str] = {}


class SessionStore:
    """Sessions of all tenants, isolated from each other. Safe from threads and processes.

    A principal names the tenant; a session is found by its tenant and name.
    """

    def __init__(self, parts: StoreComponents) -> None:
        self._parts = parts

    def save(
        self,
        principal: str,
        name: str,
        ids: Sequence[int],
        snapshot: CacheSnapshot | None = None,
        *,
        transcript: bytes | None = None,
        expected: int | None = None,
    ) -> Record:
        """Save the newest state of a session; a cache that cannot be stored is left out.

        Args:
            ids: all tokens of the session.
            snapshot: of the cache that has read them; None saves the tokens alone.
            expected: epoch that this state follows, 0 for a new session; None for the newest.
                Saving the same state twice has no effect.

        Raises:
            InputError: the session is new, and its name is invalid.
            Superseded: another state is the newest.
            BudgetError, StoreError: the tokens cannot be stored; earlier states are unchanged.
        """
        check_snapshot(ids, snapshot)
        parts, key = self._parts, self._key(principal, name)
        newest = parts.epochs.newest(key)
        previous = parts.epochs.before(key.tenant, newest, expected)
        with parts.blobs.reserve_metadata(), parts.blobs.saving(key.tenant) as transaction:
            record = self._text_record(transaction, key, name, previous, ids, transcript)
            if snapshot is not None:
                try:
                    records = [] if newest is None else [newest]
                    blobs = parts.writer.snapshot(transaction, ids, snapshot, records)
                    record = blobs.add_to(record)
                except (BudgetError, StoreError) as error:
                    parts.unwritten.note_error(error)
            if newest is not None and record == replace(newest, made=record.made):
                return newest  # saved before, by a writer that did not receive the reply
            with transaction.commit_record():
                return parts.commit(record, _is_new(newest, expected))

    def append(self, principal: str, name: str, turn: SessionTurn, expected: int) -> Record:
        """Append a turn as the newest state, keeping the cache that was saved last.

        Args:
            expected: epoch that it follows; 0 for a new session. The same turn again is one turn.

        Raises:
            InputError: the session is new, and its name is invalid.
            Superseded: another state is the newest.
            BudgetError, StoreError: it cannot be stored; earlier states are unchanged.
        """
        parts, key = self._parts, self._key(principal, name)
        newest = parts.epochs.newest(key)
        previous = parts.epochs.before(key.tenant, newest, expected)
        with parts.blobs.reserve_metadata(), parts.blobs.saving(key.tenant) as transaction:
            record = self._text_record(transaction, key, name, previous, turn.ids, turn.transcript)
            record = replace(record, labels=dict(turn.labels))
            if newest is not None and record.is_same_turn(newest):
                return newest
            if newest is not None and cache_covers(parts, newest, turn.ids):
                count = newest.num_cached_tokens
                record = record.replace_cache(newest)
                prefix = prefix_digest(turn.ids[:count])
                record = replace(record, cache_tokens=count, cache_prefix=prefix)
            is_new = _is_new(newest, expected)
            if is_new:
                parts.branches.note(record)
            with transaction.commit_record():
                return parts.commit(record, is_new)

    @contextmanager
    def stage(
        self, principal: str, ids: Sequence[int], snapshot: CacheSnapshot, names: Sequence[str] = ()
    ) -> Iterator[StagedCache]:
        """Context in which the blobs of a cache are written and pinned; blobs that are unreferenced
        at its end are deleted.

        Args:
            ids: tokens that the cache has read.
            names: of the session, and of one that its cache began with. Their chunks at several
                levels stay as they are stored.

        Raises:
            BudgetError, StoreError: they cannot be stored.
        """
        check_snapshot(ids, snapshot)
        found = [self._parts.epochs.newest(self._key(principal, name)) for name in names]
        records = [record for record in found if record is not None]
        with self._parts.blobs.saving(self._parts.tenant(principal)) as transaction:
            blobs = self._parts.writer.snapshot(transaction, ids, snapshot, records)
            yield StagedCache(tuple(ids), blobs, transaction)

    def attach(
        self,
        principal: str,
        name: str,
        staged: StagedCache,
        expected: int,
        labels: Mapping[str, str] = NO_LABELS,
    ) -> Record:
        """Attach a staged cache to a session whose text begins with the tokens it has read.

        Args:
            expected: epoch of the session.
            labels: in addition to those that the session has.

        Raises:
            Refused: there is no such session, or its text is another one.
            Superseded: another state is the newest.
            BudgetError, StoreError: the record cannot be stored.
        """
        parts, head = self._parts, self._existing_head(principal, name)
        count = len(staged.ids)
        if parts.reader.ids(head)[:count] != staged.ids:
            raise Refused("The text does not begin as the cache does.", "tokens")
        record = replace(
            staged.blobs.add_to(head),
            epoch=expected + 1,
            previous=expected,
            made=parts.clock(),
            cache_tokens=count,
            cache_prefix=prefix_digest(staged.ids),
            labels={**head.labels, **labels},
        )
        with parts.blobs.reserve_metadata(), staged.transaction.commit_record():
            return parts.commit(record)

    def label(self, principal: str, name: str, labels: Mapping[str, str], expected: int) -> Record:
        """Add labels to a session.

        The state keeps its time and replaces the one without the labels, so that no earlier state
        is pruned for it.

        Raises:
            Refused: there is no such session.
            Superseded: another state than `expected` is the newest.
            BudgetError, StoreError: the record cannot be stored.
        """
        head = self._existing_head(principal, name)
        if head.epoch != expected:
            raise superseded_error(name, expected, head.epoch)
        if labels.items() <= head.labels.items():
            return head
        labeled = replace(
            head, epoch=expected + 1, previous=expected, labels={**head.labels, **labels}
        )
        with self._parts.blobs.reserve_metadata():
            self._parts.epochs.relabel(labeled)
        return labeled

    def load(
        self,
        principal: str,
        name: str,
        requirements: CacheRequirements,
        ids: Sequence[int] | None = None,
    ) -> LoadedSession | None:
        """Load a session with its caches; None if there is none of that name.

        Args:
            ids: the text to continue, if known: it must begin with the session's.

        Raises:
            Refused: the tokens cannot be read either; the reason is in the error.
        """
        key = self._key(principal, name)
        return load_session(self._parts, key, name, requirements, ids)

    def read_transcript(self, principal: str, name: str) -> tuple[Record, bytes] | None:
        """Newest state of a session and its transcript, without a cache; None if there is none.

        Raises:
            Damaged: the transcript, or every record of the session, is damaged.
            Refused: it cannot be read for another reason, named in the error.
        """
        return load_transcript(self._parts, self._key(principal, name), name)

    def restart_epoch(self, principal: str, name: str) -> int:
        """Epoch that a new beginning of a damaged session follows; 0 if it is intact or missing.

        If every record is damaged, the session is removed, so that its name is free.
        """
        parts, key = self._parts, self._key(principal, name)
        try:
            record = parts.epochs.head(key)
        except Damaged:
            parts.epochs.remove_damaged(key, name, parts.clock())
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
        return self._parts.epochs.head(self._key(principal, name))

    def heads(self, principal: str | None = None) -> list[Record]:
        """Newest state of every session, most recently used first, checked against the disk.

        Args:
            principal: whose sessions; None for all.
        """
        parts = self._parts
        wanted = None if principal is None else parts.tenant(principal)
        found: list[Record] = []
        for key in parts.manifest.sessions():
            if wanted not in (None, key.tenant):
                continue
            try:
                record = parts.epochs.head(key)
            except LarderError as error:
                parts.refusals.note_error(error)
                continue
            if record is not None:
                found.append(record)
        return found

    def indexed_heads(self, principal: str) -> list[Record]:
        """Newest state of each session of one principal, most recently used first.

        Read from the local index: sessions of other machines appear after their first access.
        """
        return self._parts.epochs.indexed_heads(self._parts.tenant(principal))

    def branches(self, principal: str, root: str) -> list[str]:
        """Names of sessions with this root (`ROOT_LABEL`), on any machine, oldest first."""
        return self._parts.branches.of(self._parts.tenant(principal), root)

    def has_cache(self, record: Record) -> bool:
        """True if a session has a cache that was not evicted."""
        return has_cache(self._parts, record)

    def has_moved(self, principal: str, name: str, epoch: int) -> bool:
        """True if a session's newest epoch differs from this one; 0 means no session."""
        newest = self._parts.epochs.newest(self._key(principal, name))
        return epoch != (0 if newest is None or newest.removed else newest.epoch)

    def fork(self, principal: str, name: str, new_name: str, epoch: int | None = None) -> Record:
        """Create a session from a state of another; caches are shared, not copied.

        Raises:
            InputError: there is no such session or state, or the new name is invalid or taken.
            BudgetError, Refused, StoreError: tokens and transcript cannot be read, or not stored.
        """
        parts, key = self._parts, self._key(principal, new_name)
        source = self._state(principal, name, epoch)
        previous = parts.epochs.free_epoch(key, new_name)
        with parts.blobs.reserve_metadata(), parts.blobs.saving(key.tenant) as transaction:
            texts = parts.reader.for_session(source, key.session).items()
            record = replace(
                source,
                session=key.session,
                name=new_name,
                epoch=previous + 1,
                previous=previous,
                labels={**source.labels, ROOT_LABEL: new_name, PINNED_LABEL: NO},
                made=parts.clock(),
                **{part: transaction.put(data) for part, data in texts},
            )
            with transaction.commit_record():
                return parts.commit(record, is_new=True)

    def roll_back(self, principal: str, name: str, epoch: int) -> Record:
        """Restore an earlier state as the newest; the states in between are retained for a while.

        Raises:
            InputError: there is no such session, or that state is not retained.
            Superseded: another writer has continued the session meanwhile.
        """
        parts, head = self._parts, self._state(principal, name, None)
        source = self._state(principal, name, epoch)
        record = replace(source, epoch=head.epoch + 1, previous=head.epoch, made=parts.clock())
        with parts.blobs.reserve_metadata():
            return parts.commit(record)

    def compact(self, principal: str, name: str) -> int:
        """Keep only the newest state of a session; return the bytes freed."""
        parts = self._parts
        freed = parts.garbage.states(parts.epochs.prune(self._key(principal, name), keep=1))
        parts.blobs.settle()
        return freed

    def remove(self, principal: str, name: str) -> int:
        """Remove a session and the blobs that only it referred to; return the bytes freed.

        Later writes to it fail. Other sessions that share its chunks are not affected.

        Raises:
            InputError: there is no such session.
        """
        parts = self._parts
        try:
            head = self._state(principal, name, None)
        except Damaged:
            parts.epochs.remove_damaged(self._key(principal, name), name, parts.clock())
            return 0
        tombstone = Record(
            head.tenant,
            head.session,
            name,
            head.epoch + 1,
            head.tokens,
            num_tokens=0,
            previous=head.epoch,
            made=parts.clock(),
            removed=True,
        )
        parts.epochs.commit(tombstone, head.epoch)
        parts.branches.forget(head)
        return self.compact(principal, name)

    def export(self, record: Record) -> bytes:
        """Session as the bytes of a file.

        Raises:
            Damaged: a part of it is damaged.
        """
        return export_session(self._parts, record)

    def import_file(self, data: bytes, principal: str, name: str) -> Record:
        """Import a session from a file that `export` wrote.

        Raises:
            InputError: the file is not an export, or the name is invalid or taken.
            Refused: it is of another version.
            BudgetError, StoreError: it cannot be stored.
        """
        return import_session(self._parts, data, self._key(principal, name), name)

    def _key(self, principal: str, name: str) -> SessionKey:
        return SessionKey.named(self._parts.tenant(principal), name)

    def _existing_head(self, principal: str, name: str) -> Record:
        head = self.head(principal, name)
        if head is None:
            raise Refused(f"Session {name!r} no longer exists.", "gone")
        return head

    def _state(self, principal: str, name: str, epoch: int | None) -> Record:
        parts, key = self._parts, self._key(principal, name)
        head = parts.epochs.head(key)
        if head is None:
            raise InputError(f"There is no session {name!r}: 'larder cache list' names all.")
        record = head if epoch is None else parts.epochs.epoch(key, epoch)
        if record is None or record.removed:
            retained = ", ".join(map(str, parts.manifest.epochs(key)))
            raise InputError(f"Session {name!r} has no state {epoch}: it has {retained}.")
        return record

    def _text_record(
        self,
        transaction: BlobTransaction,
        key: SessionKey,
        name: str,
        previous: int,
        ids: Sequence[int],
        transcript: bytes | None,
    ) -> Record:
        """Record of the next state, without a cache; its token log and transcript are written."""
        tokens = transaction.put(encode_token_log(ids, key.tenant, key.session))
        text = None
        if transcript is not None:
            text = transaction.put(add_owner(transcript, key.tenant, key.session))
        return Record(
            key.tenant,
            key.session,
            name,
            epoch=previous + 1,
            tokens=tokens,
            num_tokens=len(ids),
            previous=previous,
            transcript=text,
            made=self._parts.clock(),
        )


def _is_new(newest: Record | None, expected: int | None) -> bool:
    """True if the next state begins a session."""
    return not expected and (newest is None or newest.removed)
