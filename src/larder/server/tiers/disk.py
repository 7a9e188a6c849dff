"""Disk tier: session caches in the store, written in the background and verified when loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError, LarderError, Refused
from larder.engine.snapshots import ModelSnapshots
from larder.server.model_thread import CompletionQueue
from larder.server.persistence.base import Durability
from larder.server.persistence.store import StoreSessionPersistence, saved_cache
from larder.server.resident_caches import PrefixCaches
from larder.server.session_backend.chat_snapshot import restore_chat
from larder.server.session_info import session_info
from larder.server.session_state import SavedCache, SessionState
from larder.session.caches import SessionCaches
from larder.store.blobs.payloads import is_lossless_codec
from larder.store.ledger import UNLIMITED, ByteLedger, Reservation, Tier

MAX_LOADS = 2  # concurrent cache loads
SLOWER_THAN_RECOMPUTE = "slower"


@dataclass(frozen=True)
class LoadedCaches:
    """Caches of a session, loaded from the store.

    Args:
        chat_state: record of `encode_chat_state` that is stored with them, if any.
    """

    caches: tuple[SequenceCache, ...]
    chat_state: bytes | None = None


@dataclass(frozen=True)
class StartedLoad:
    """Load of a session's caches that no request has asked for yet.

    Args:
        reservation: host memory for the load.
    """

    saved: SavedCache
    reservation: Reservation
    future: Future[LoadedCaches]


@dataclass(frozen=True)
class DiskTierStats:
    """Figures of a disk tier.

    Args:
        used, budget: bytes in the store, and its capacity if limited, by tier.
        rejected: stored caches that could not be used, by reason.
        unwritten: turns, caches and pins that the store did not accept, by reason.
        written_bytes: bytes written since the server started.
    """

    used: Mapping[str, int] = field(default_factory=dict)
    budget: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)
    written_bytes: int = 0


class DiskTier:
    """Contract of the disk tier, and its null object, which stores nothing.

    Args:
        durability: condition for reporting the end of an answer.
    """

    is_open = False
    durability = Durability.TURN

    def save(
        self, session: SessionState, caches: Sequence[SequenceCache], chat_state: bytes | None
    ) -> Future[SavedCache]:
        """Write a session's caches and their chat state; the caches must not change until it is
        done."""
        raise NotImplementedError

    def load(self, source: SessionState, stored: SavedCache) -> Future[LoadedCaches]:
        """Load a session's caches into host memory; fails with `Refused` if they must be
        recomputed."""
        raise NotImplementedError

    def reject(self, error: LarderError) -> None:
        """Count a loaded cache that cannot be used."""

    def note_reading(self, tokens: int, seconds: float) -> None:
        """Record the measured time of a prefill."""

    def seconds_to_read(self, tokens: int) -> float:
        """Estimated prefill time; one second per token if nothing was measured."""
        return float(tokens)

    def stats(self) -> DiskTierStats:
        """Present figures of the store."""
        return DiskTierStats()

    def stop(self) -> None:
        """Give up what the store has not answered, turns included, because the process ends."""

    def close(self) -> None:
        """Finish pending work."""


class StoreDiskTier(DiskTier):
    """Disk tier in the store of a session persistence.

    Args:
        snapshots: of the served model.
    """

    is_open = True

    def __init__(
        self,
        persistence: StoreSessionPersistence,
        snapshots: ModelSnapshots,
        durability: Durability,
    ) -> None:
        self._persistence, self._snapshots = persistence, snapshots
        self.durability = durability
        self._saving = ThreadPoolExecutor(1, "larder saving")
        self._loading = ThreadPoolExecutor(MAX_LOADS, "larder loading")
        self._parts = snapshots.store.parts

    def save(
        self, session: SessionState, caches: Sequence[SequenceCache], chat_state: bytes | None
    ) -> Future[SavedCache]:
        residency = session.residency
        ids, policy = tuple(residency.cached_ids), str(session.serving.policy)
        names = [name for name in (session.name, residency.source_name) if name]
        is_coded = residency.is_coded or not is_lossless_codec(self._snapshots.codec)
        is_lossless = residency.is_lossless and not is_coded
        view = session_info(session)
        labels = {
            "settled": str(residency.settled_tokens),
            "entries": str(residency.occupancy.entries),
            "coded": "yes" if is_coded else "no",
            "whole": "yes" if is_lossless else "no",
            "kept": str(view.kept_tokens),
            "held": str(view.held_tokens),
            "budget": "" if view.budget_tokens is None else str(view.budget_tokens),
            "evicted": str(view.evicted_tokens),
            "merged": str(view.merged_tokens),
        }

        def saved() -> SavedCache:
            try:
                snapshot = self._snapshots.snapshot(policy, caches, chat_state)
                stage = self._snapshots.store.sessions.stage
                with stage(session.tenant, ids, snapshot, names) as staged:
                    record = self._persistence.attach(session, staged, labels).result()
            except LarderError as error:
                self._parts.unwritten.note_error(error)
                raise
            found = saved_cache(record)
            assert found is not None
            return found

        return self._saving.submit(saved)

    def load(self, source: SessionState, stored: SavedCache) -> Future[LoadedCaches]:
        policy = str(source.serving.policy)
        ids = tuple(source.transcript.ids[: stored.tokens])

        def loaded() -> LoadedCaches:
            found = self._snapshots.load(source.tenant, source.name, policy)
            if found is None or found.cache is None:
                reason = "gone" if found is None else found.reason
                raise Refused(f"The cache of {source.name!r} is recomputed: {reason}.", reason)
            if found.ids[: found.record.num_cached_tokens] != ids:
                message = f"The cache of {source.name!r} belongs to another text."
                self._parts.refusals.note("tokens", message)
                raise Refused(message, "tokens")
            if found.levels and source.serving.is_chat and found.cache.next_position < len(ids):
                message = "A chat needs its whole cache, but a part is read again."
                raise Refused(message, found.reason or "slower")
            try:
                chat_state = self._parts.reader.extra_state(found.record)
            except LarderError as error:
                raise Refused(str(error), self._parts.refusals.note_error(error)) from error
            return LoadedCaches((found.cache, *found.others), chat_state)

        return self._loading.submit(loaded)

    def reject(self, error: LarderError) -> None:
        self._parts.refusals.note_error(error)

    def note_reading(self, tokens: int, seconds: float) -> None:
        self._snapshots.record_prefill_time(tokens, seconds)

    def seconds_to_read(self, tokens: int) -> float:
        seconds = self._parts.throughput.prefill_seconds(tokens)
        return float(tokens) if seconds is None else seconds

    def stats(self) -> DiskTierStats:
        limit = self._parts.ledger.limit(Tier.DISK)
        return DiskTierStats(
            used={Tier.DISK.value: self._parts.ledger.used(Tier.DISK)},
            budget={Tier.DISK.value: limit} if limit < UNLIMITED else {},
            rejected=self._parts.refusals.counts(),
            unwritten=self._parts.unwritten.counts(),
            written_bytes=self._parts.file_system.written_bytes,
        )

    def stop(self) -> None:
        self._parts.executor.stop()

    def close(self) -> None:
        self._saving.shutdown()
        self._loading.shutdown()


class DiskTierWriter:
    """Writes one session's caches at a time. For the model's thread; another thread writes to the
    store.

    Args:
        ended: called after each write.
    """

    def __init__(
        self,
        ledger: ByteLedger,
        disk: DiskTier,
        completions: CompletionQueue,
        ended: Callable[[], None],
    ) -> None:
        self._ledger, self._disk, self._completions, self._ended = ledger, disk, completions, ended
        self._reservations: dict[int, list[Reservation]] = {}
        self._futures: dict[int, Future[SavedCache]] = {}
        self._tenants: dict[int, str] = {}
        self._times: dict[int, tuple[float, int]] = {}  # of starts, with the bytes to write
        self._bytes_per_second, self._leaves_next = 0.0, False
        self.saved = 0

    @property
    def is_busy(self) -> bool:
        """True while a write is in progress."""
        return bool(self._reservations)

    def is_writing(self, tenant: str | None) -> bool:
        """True if a write of this tenant is in progress; None means any tenant."""
        return self.is_busy if tenant is None else tenant in self._tenants.values()

    def write_in_progress(self, session: SessionState) -> Future[SavedCache] | None:
        """The write of this session's caches, if it is in progress."""
        return self._futures.get(session.key)

    def awaitable(self, tenant: str | None, seconds: float) -> Future[SavedCache] | None:
        """Write in progress that ends within some time, as far as is known; None if there is none.

        Args:
            tenant: only one of this tenant; None for any.
        """
        for key, (started, count) in self._times.items():
            rate = self._bytes_per_second
            left = started + count / rate - perf_counter() if rate else 0.0
            if tenant in (None, self._tenants[key]) and left <= seconds:
                return self._futures[key]
        return None

    def leave_next(self) -> None:
        """Leave out the call of `ended` after the write in progress."""
        self._leaves_next = True

    def start_bytes(self, count: int) -> int:
        """Host memory of a write that could start now: `count`, or 0 if none could."""
        return 0 if self.is_busy or not self._disk.is_open else count

    def may_write(self, session: SessionState) -> bool:
        """True if an idle session's cache may be written and is not in the store."""
        is_idle = not (
            session.usage.is_answering or session.usage.is_running or session.residency.is_saving
        )
        return is_idle and self.can_write(session) and not session.durability.pending_writes

    def can_write(self, session: SessionState) -> bool:
        """True if the store could have the session's cache, but does not."""
        residency = session.residency
        if not residency.contains(len(session.turns)):  # reservations precede the cache
            return False
        is_written = session.is_durable and len(session.turns) > 0
        is_refused = residency.failed_write_tokens == len(residency.cached_ids)
        return self._disk.is_open and is_written and not residency.is_saved and not is_refused

    def start(self, session: SessionState) -> Future[SavedCache] | None:
        """Write a session's caches; None if there is no host memory for the copies."""
        try:
            count = session.residency.write_bytes
            reservation = self._ledger.reserve(Tier.HOST, session.tenant, count)
        except BudgetError:
            return None
        return self._begin(session, reservation)

    def release_after_write(self, session: SessionState, reservation: Reservation) -> None:
        """Release a reservation once the session's write is done; at once if there is none."""
        if session.residency.is_saving:
            self._reservations[session.key].append(reservation)
        else:
            reservation.release()

    def _begin(self, session: SessionState, reservation: Reservation) -> Future[SavedCache]:
        residency = session.residency
        held = residency.resident_caches
        assert held is not None
        chat_state, caches = held.record(session), held.written_caches()
        residency.is_saving = True
        session.durability.pending_writes += 1
        self._reservations[session.key] = [reservation]
        self._tenants[session.key] = session.tenant
        self._times[session.key] = perf_counter(), residency.write_bytes
        future = self._futures[session.key] = self._disk.save(session, caches, chat_state)
        self._completions.when_done(
            future, partial(self._on_written, session, len(residency.cached_ids))
        )
        return future

    def _on_written(self, session: SessionState, tokens: int, future: Future[SavedCache]) -> None:
        residency = session.residency
        residency.is_saving = False
        session.durability.pending_writes -= 1
        if residency.caches is not None:
            residency.caches.end_lending()
        del self._futures[session.key], self._tenants[session.key]
        started, count = self._times.pop(session.key)
        for reservation in self._reservations.pop(session.key):
            reservation.release()
        if future.exception() is None:
            residency.saved_cache, residency.failed_write_tokens = future.result(), -1
            self.saved += 1
            self._bytes_per_second = count / max(perf_counter() - started, 1e-9)
        else:
            residency.failed_write_tokens = tokens
        if self._leaves_next:
            self._leaves_next = False
        else:
            self._ended()


def install_caches(
    session: SessionState,
    source: SessionState,
    stored: SavedCache,
    loaded_caches: LoadedCaches,
    reservation: Reservation,
) -> None:
    """Install loaded caches in a session, in host memory.

    Args:
        source: session that they belonged to.
        stored: record of the caches in the store.
        reservation: host memory that they are in; the session has it afterwards.

    Raises:
        Damaged: the chat caches do not match the transcript; nothing has changed.
    """
    residency = session.residency
    read = source.transcript.ids[: stored.tokens]
    if session.serving.is_chat:
        restore_chat(session, read, loaded_caches.caches, loaded_caches.chat_state)
    else:
        spec = session.serving.runtime.decoder.spec
        # What was not loaded of a streamed cache is read again.
        read = read[: loaded_caches.caches[0].next_position]
        residency.resident_caches = PrefixCaches(SessionCaches(spec, loaded_caches.caches[:1]))
        reservation.shrink(residency.nbytes)
    residency.reservation = reservation
    residency.cached_ids = read
    residency.settled_tokens = min(stored.settled_tokens, len(read))
    residency.is_coded = stored.is_coded
    residency.note_source(source)
