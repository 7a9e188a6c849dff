"""Session store: save, load, fork, roll back and remove sessions.

A damaged or unsuitable cache does not lose its session: the token log is a blob of its own, and the
text is prefilled again. The reason is logged and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError, Damaged, InputError, LarderError, Refused, StoreError
from larder.core.spec import ModelSpec
from larder.store.blobs.payloads import add_owner, encode_token_log
from larder.store.blobs.tenant_blobs import BlobTransaction
from larder.store.components import StoreComponents
from larder.store.ledger import Tier
from larder.store.model_identity import ModelIdentity
from larder.store.prefix import chunk_index
from larder.store.sessions.cache_io import CacheSnapshot, check_snapshot, is_shareable
from larder.store.sessions.records import NO, PINNED_LABEL, ROOT_LABEL, Record, session_key
from larder.store.throughput import RestorePath


@dataclass(frozen=True)
class CacheRequirements:
    """Requirements of a reader: caches of other models or policies are not used.

    Args:
        policy: canonical spelling, sizes filled in.
    """

    identity: ModelIdentity
    policy: str
    spec: ModelSpec


@dataclass(frozen=True)
class LoadedSession:
    """Session as loaded.

    Args:
        record: its newest record.
        ids: every token of it; the caches may have read fewer, as the record tells.
        transcript: text of the conversation, if saved.
        cache: None if the text must be prefilled again.
        reason: one word for a missing cache; empty if there is a cache.
        others: the caches behind the first, where the session has several.
    """

    record: Record
    ids: tuple[int, ...]
    transcript: bytes | None
    cache: SequenceCache | None
    reason: str = ""
    others: tuple[SequenceCache, ...] = ()


class SessionStore:
    """Sessions of all tenants, isolated from each other. Safe from threads and processes."""

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
            ids: every token that was read.
            snapshot: of the cache that has read them; None keeps the tokens alone.
            expected: the epoch that this state follows, 0 for a new session; None for whichever
                is the newest. Saving the same state twice is saving it once.

        Raises:
            InputError: the session is new, and none may be called so.
            Superseded: another state is the newest.
            BudgetError, StoreError: not even the tokens can be kept; what was saved before is
                untouched.
        """
        check_snapshot(ids, snapshot)
        tenant, session = self._keys(principal, name)
        newest = self._parts.heads.newest(tenant, session)
        is_new = not expected and (newest is None or newest.removed)
        expected = self._parts.heads.before(tenant, newest, expected)
        said = None if transcript is None else add_owner(transcript, tenant, session)
        with (
            self._parts.blobs.reserve_metadata(),
            self._parts.blobs.saving(tenant) as saving,
        ):
            record = Record(
                tenant,
                session,
                name,
                expected + 1,
                tokens=saving.put(encode_token_log(ids, tenant, session)),
                num_tokens=len(ids),
                previous=expected,
                transcript=None if said is None else saving.put(said),
                made=self._parts.clock(),
            )
            if snapshot is not None:
                record = self._with_cache(saving, record, ids, snapshot)
            if newest is not None and _is_retry(record, newest):
                return newest
            with saving.commit_record():
                return self._parts.commit(record, is_new)

    def load(
        self, principal: str, name: str, asking: CacheRequirements, ids: Sequence[int] | None = None
    ) -> LoadedSession | None:
        """Load a session; None if there is none of that name.

        Args:
            ids: the text to go on with, where it is known: it must begin with the session's.

        Raises:
            Refused: the tokens cannot be read either; the reason is in the error.
        """
        parts, (tenant, session) = self._parts, self._keys(principal, name)
        try:
            record = parts.heads.head(tenant, session)
            if record is None:
                return None
            known = parts.reader.ids(record)
            said = None if record.transcript is None else parts.reader.transcript(record)
        except LarderError as error:
            reason = parts.refusals.note_error(error)
            raise Refused(f"Session {name!r} cannot be read: {error}", reason) from error
        try:
            self._check(record, known, asking, ids)
            read = known[: record.num_cached_tokens]
            cache, *others = parts.reader.caches(record, read, asking.identity, asking.spec)
            with parts.unwritten.suppressed():
                parts.manifest.used(tenant, session)
        except LarderError as error:
            return LoadedSession(record, known, said, None, parts.refusals.note_error(error))
        return LoadedSession(record, known, said, cache, others=tuple(others))

    def has_moved(self, principal: str, name: str, epoch: int) -> bool:
        """True if a session's newest epoch differs from this one; 0 means no session."""
        newest = self._parts.heads.newest(*self._keys(principal, name))
        return epoch != (0 if newest is None or newest.removed else newest.epoch)

    def fork(self, principal: str, name: str, new_name: str, epoch: int | None = None) -> Record:
        """Create a session from a state of another; caches are shared, not copied.

        Raises:
            InputError: there is no such session or state, or the new name is none or taken.
            BudgetError, Refused, StoreError: what was said cannot be had, or not be kept again.
        """
        tenant, session = self._keys(principal, new_name)
        source = self._state(principal, name, epoch)
        newest = self._parts.heads.newest(tenant, session)
        if newest is not None and not newest.removed:
            raise InputError(f"There is a session {new_name!r} already: take another name.")
        number = self._parts.heads.before(tenant, newest, None)
        own = {"session": session, "name": new_name, "epoch": number + 1, "previous": number}
        own["labels"] = {**source.labels, ROOT_LABEL: new_name, PINNED_LABEL: NO}
        with (
            self._parts.blobs.reserve_metadata(),
            self._parts.blobs.saving(tenant) as saving,
        ):
            for part, data in self._parts.reader.for_session(source, session).items():
                own[part] = saving.put(data)
            with saving.commit_record():
                made = replace(source, **own, made=self._parts.clock())
                return self._parts.commit(made, is_new=True)

    def roll_back(self, principal: str, name: str, epoch: int) -> Record:
        """Restore an earlier state as the newest; the states in between are retained for a while.

        Raises:
            InputError: there is no such session, or that state is not kept any more.
            Superseded: somebody else has written the session meanwhile.
        """
        head, source = self._state(principal, name, None), self._state(principal, name, epoch)
        number = {"epoch": head.epoch + 1, "previous": head.epoch}
        with self._parts.blobs.reserve_metadata():
            return self._parts.commit(replace(source, **number, made=self._parts.clock()))

    def remove(self, principal: str, name: str) -> int:
        """Remove a session and the blobs that only it referred to; return the bytes freed.

        Whoever still writes it finds it gone. Others that share its chunks are not touched.

        Raises:
            InputError: there is no such session.
        """
        parts = self._parts
        try:
            head = self._state(principal, name, None)
        except Damaged:
            parts.heads.remove_damaged(*self._keys(principal, name), name, parts.clock())
            return 0
        own = head.tenant, head.session
        gone = Record(
            *own, name, head.epoch + 1, head.tokens, 0, head.epoch, made=parts.clock(), removed=True
        )
        parts.heads.commit(gone, gone.previous)
        parts.branches.forget(head)
        dropped = parts.heads.prune(*own, keep=1)
        freed = parts.garbage.states(dropped)
        parts.blobs.settle()
        return freed

    def heads(self, principal: str | None = None) -> list[Record]:
        """Newest state of every session, most recently used first.

        Args:
            principal: whose; None for everybody's.
        """
        parts = self._parts
        wanted = None if principal is None else parts.tenant(principal)
        found: list[Record] = []
        for tenant, session in parts.manifest.sessions():
            if wanted not in (None, tenant):
                continue
            try:
                record = parts.heads.head(tenant, session)
            except LarderError as error:
                parts.refusals.note_error(error)
                continue
            if record is not None:
                found.append(record)
        return found

    def _keys(self, principal: str, name: str) -> tuple[str, str]:
        tenant = self._parts.tenant(principal)
        return tenant, session_key(tenant, name)

    def _state(self, principal: str, name: str, epoch: int | None) -> Record:
        own = self._keys(principal, name)
        head = self._parts.heads.head(*own)
        if head is None:
            raise InputError(f"There is no session {name!r}: 'larder cache list' names all.")
        record = head if epoch is None else self._parts.heads.epoch(*own, epoch)
        if record is None or record.removed:
            kept = ", ".join(map(str, self._parts.manifest.epochs(*own)))
            raise InputError(f"Session {name!r} has no state {epoch}: it has {kept}.")
        return record

    def _with_cache(
        self, saving: BlobTransaction, record: Record, ids: Sequence[int], snapshot: CacheSnapshot
    ) -> Record:
        """Record with the cache's blobs, or without if they cannot be stored."""
        chunks = len(ids) // chunk_index.CHUNK_TOKENS if is_shareable(snapshot) else 0
        try:
            with self._parts.blobs.reserve_metadata(chunks):
                written = self._parts.writer.snapshot(saving, record.tenant, ids, snapshot)
        except (BudgetError, StoreError) as error:
            self._parts.unwritten.note_error(error)
            return record
        return replace(
            record,
            identity=snapshot.identity.told(),
            policy=snapshot.policy,
            codec=snapshot.codec,
            cache=snapshot.cache.meta(),
            spans=written.spans,
            cache_bytes=written.cache_bytes,
            lossless=written.lossless,
            others=written.others,
            beside=written.beside,
        )

    def _check(
        self,
        record: Record,
        known: Sequence[int],
        asking: CacheRequirements,
        ids: Sequence[int] | None,
    ) -> None:
        """Check that a cache fits the request. Raises: Refused: it does not, or prefill is
        faster.
        """
        if not record.spans:
            raise Refused("The session was saved without a cache.", "tokens only")
        if self._parts.blobs.index.is_evicted(record):
            raise Refused("The cache was evicted.", "evicted")
        differing = asking.identity.differences(ModelIdentity.of(record.identity))
        if differing:
            raise Refused(f"The cache differs in {', '.join(differing)}.", "identity")
        if record.policy != asking.policy:
            raise Refused(f"The cache was made by {record.policy}.", "policy")
        read = tuple(known[: record.num_cached_tokens])
        if ids is not None and tuple(ids[: len(read)]) != read:
            raise Refused("The text does not begin as the session does.", "tokens")
        stored = sum(ref.bytes for ref in record.spans)
        if self._parts.throughput.choose(Tier.DISK, stored, len(read)) is not RestorePath.LOAD:
            raise Refused("Prefill is faster than loading the cache.", "slower")


def _is_retry(record: Record, newest: Record) -> bool:
    """True if this state was saved before by a writer that did not receive the reply."""
    return record == replace(newest, made=record.made)
