"""Caches in the store: written while others are answered, verified when they come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError, LarderError, Refused
from larder.engine.snapshots import ModelSnapshots
from larder.server.model_thread import CompletionQueue
from larder.server.persistence.base import Durability
from larder.server.persistence.store import StoreSessionPersistence, saved_cache
from larder.server.session_backend.chat_snapshot import (
    encode_chat_state,
    has_all_turns,
    restore_chat,
)
from larder.server.session_info import session_info
from larder.server.session_state import SavedCache, SessionState
from larder.session.caches import offload
from larder.store.blobs.payloads import is_lossless_codec
from larder.store.ledger import UNLIMITED, ByteLedger, Reservation, Tier

MAX_LOADS = 2  # caches that are read from the store at a time
SLOWER_THAN_RECOMPUTE = "slower"


@dataclass(frozen=True)
class LoadedCaches:
    """What came back of a session.

    Args:
        beside: what was told beside the caches, where anything was.
    """

    caches: tuple[SequenceCache, ...]
    beside: bytes | None = None


class DiskTier:
    """Keeps the caches of sessions that are not in use; this one keeps none.

    Args:
        durability: what the end of an answer waits for.
    """

    is_open = False
    durability = Durability.TURN

    def save(
        self, sitting: SessionState, caches: Sequence[SequenceCache], beside: bytes | None
    ) -> Future[SavedCache]:
        """Write a session's caches, which nobody changes until that is over, and what more is to
        be told of them."""
        raise NotImplementedError

    def load(self, source: SessionState, kept: SavedCache) -> Future[LoadedCaches]:
        """A session's caches, in host memory; fails as `Refused` where its text is to be read."""
        raise NotImplementedError

    def reject(self, error: LarderError) -> None:
        """Count that what came back cannot be used."""

    def note_reading(self, tokens: int, seconds: float) -> None:
        """The model has read so many tokens in that time."""

    def seconds_to_read(self, tokens: int) -> float:
        """How long that takes; by the token where nothing is known."""
        return float(tokens)

    def bytes_by_tier(self) -> dict[str, int]:
        """What the store holds."""
        return {}

    def budget_by_tier(self) -> dict[str, int]:
        """What it may hold."""
        return {}

    def rejected(self) -> Mapping[str, int]:
        """Caches that were not taken back, by reason."""
        return {}

    def unwritten(self) -> Mapping[str, int]:
        """Turns, caches and pins that the store has not taken, by reason."""
        return {}

    def written_bytes(self) -> int:
        """Since the server started."""
        return 0

    def close(self) -> None:
        """Finish what is on its way."""


class StoreDiskTier(DiskTier):
    """Keeps them in the store where `keeper` keeps what was said.

    Args:
        snapshots: of the model that answers.
    """

    is_open = True

    def __init__(
        self, keeper: StoreSessionPersistence, snapshots: ModelSnapshots, durability: Durability
    ) -> None:
        self._keeper, self._snapshots = keeper, snapshots
        self.durability = durability
        self._saving = ThreadPoolExecutor(1, "larder saving")
        self._loading = ThreadPoolExecutor(MAX_LOADS, "larder loading")
        self._parts = snapshots.store.parts

    def save(
        self, sitting: SessionState, caches: Sequence[SequenceCache], beside: bytes | None
    ) -> Future[SavedCache]:
        ids, policy = tuple(sitting.read), str(sitting.rule.policy)
        is_coded = sitting.is_coded or not is_lossless_codec(self._snapshots.codec)
        is_whole = sitting.is_lossless and not is_coded
        view = session_info(sitting)
        labels = {
            "settled": str(sitting.settled_tokens),
            "entries": str(sitting.held.entries),
            "coded": "yes" if is_coded else "no",
            "whole": "yes" if is_whole else "no",
            "kept": str(view.kept_tokens),
            "held": str(view.held_tokens),
            "budget": "" if view.budget_tokens is None else str(view.budget_tokens),
            "evicted": str(view.evicted_tokens),
            "merged": str(view.merged_tokens),
        }

        def saved() -> SavedCache:
            try:
                snapshot = self._snapshots.snapshot(policy, caches, beside)
                with self._snapshots.store.turns.stage(sitting.tenant, ids, snapshot) as made:
                    record = self._keeper.attach(sitting, made, labels).result()
            except LarderError as error:
                self._parts.unwritten.note_error(error)
                raise
            found = saved_cache(record)
            assert found is not None
            return found

        return self._saving.submit(saved)

    def load(self, source: SessionState, kept: SavedCache) -> Future[LoadedCaches]:
        own = source.tenant, source.name, str(source.rule.policy)
        ids = tuple(source.ids[: kept.tokens])

        def loaded() -> LoadedCaches:
            found = self._snapshots.load(*own)
            if found is None or found.cache is None:
                reason = "gone" if found is None else found.reason
                raise Refused(f"The cache of {source.name!r} is read anew: {reason}.", reason)
            if found.ids[: found.record.num_cached_tokens] != ids:
                said = f"The cache of {source.name!r} is of another text."
                self._parts.refusals.note("tokens", said)
                raise Refused(said, "tokens")
            try:
                beside = self._parts.vault.beside(found.record)
            except LarderError as error:
                raise Refused(str(error), self._parts.refusals.note_error(error)) from error
            return LoadedCaches((found.cache, *found.others), beside)

        return self._loading.submit(loaded)

    def reject(self, error: LarderError) -> None:
        self._parts.refusals.note_error(error)

    def note_reading(self, tokens: int, seconds: float) -> None:
        self._snapshots.record_prefill_time(tokens, seconds)

    def seconds_to_read(self, tokens: int) -> float:
        seconds = self._parts.throughput.prefill_seconds(tokens)
        return float(tokens) if seconds is None else seconds

    def bytes_by_tier(self) -> dict[str, int]:
        return {Tier.DISK.value: self._parts.ledger.used(Tier.DISK)}

    def budget_by_tier(self) -> dict[str, int]:
        limit = self._parts.ledger.limit(Tier.DISK)
        return {Tier.DISK.value: limit} if limit < UNLIMITED else {}

    def rejected(self) -> Mapping[str, int]:
        return self._parts.refusals.counts()

    def unwritten(self) -> Mapping[str, int]:
        return self._parts.unwritten.counts()

    def written_bytes(self) -> int:
        return self._parts.place.written_bytes

    def close(self) -> None:
        self._saving.shutdown()
        self._loading.shutdown()


WRITE_COPIES = 2  # of a cache that is written: its state, and the blob in the making


def write_memory_bytes(sitting: SessionState) -> int:
    """Host memory that it takes to write a session's caches, beside them.

    Those of a chat are written one after the other. As many bytes as it has may be held twice
    meanwhile: what is on the device, and what is wanted there.
    """
    if sitting.chat_cache is None:
        return WRITE_COPIES * sitting.nbytes
    largest = max(held.nbytes for held in sitting.chat_cache.caches.usage())
    return sitting.nbytes + WRITE_COPIES * largest


class DiskTierWriter:
    """For the model's thread; the store is written by another one.

    Args:
        ended: told whenever a writing is over.
    """

    def __init__(
        self, ledger: ByteLedger, vault: DiskTier, news: CompletionQueue, ended: Callable[[], None]
    ) -> None:
        self._ledger, self._vault, self._news, self._ended = ledger, vault, news, ended
        self._late: dict[int, list[Reservation]] = {}
        self._under_way: dict[int, Future[SavedCache]] = {}
        self.saved = 0

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return bool(self._late)

    def under_way(self, sitting: SessionState) -> Future[SavedCache] | None:
        """The writing of a session's cache, where it is being written."""
        return self._under_way.get(sitting.key)

    def soon(self, count: int) -> int:
        """What a writing takes that can begin now; nothing where none can."""
        return 0 if self.is_busy or not self._vault.is_open else count

    def wants(self, sitting: SessionState) -> bool:
        """Whether a cache that is not in use may be written, and was not."""
        is_idle = not (sitting.is_answering or sitting.is_running or sitting.is_saving)
        return is_idle and self.needs(sitting) and not sitting.pending_writes

    def needs(self, sitting: SessionState) -> bool:
        """Whether the store could have a cache, but has not."""
        if (
            not sitting.has_resident_cache
        ):  # who asks for memory stands in it before there is a cache
            return False
        is_written = sitting.written > 0 and sitting.durable_turns == len(sitting.said) > 0
        if sitting.chat_cache is not None and not has_all_turns(sitting):
            return False
        is_refused = sitting.failed_write_tokens == len(sitting.read)
        return self._vault.is_open and is_written and not sitting.is_saved and not is_refused

    def start(self, sitting: SessionState) -> Future[SavedCache] | None:
        """Write a session's cache; None where there is no room for the copies that takes."""
        try:
            room = self._ledger.reserve(Tier.HOST, sitting.tenant, write_memory_bytes(sitting))
        except BudgetError:
            return None
        return self._begin(sitting, room)

    def hold(self, sitting: SessionState, reservation: Reservation) -> None:
        """Give memory back once the session's writing is over; at once where none is on its way."""
        if sitting.is_saving:
            self._late[sitting.key].append(reservation)
        else:
            reservation.release()

    def _begin(self, sitting: SessionState, room: Reservation) -> Future[SavedCache]:
        cabinet = sitting.chat_cache
        beside = None if cabinet is None else encode_chat_state(sitting)
        caches = (_read_only_cache(sitting),) if cabinet is None else cabinet.caches.lend_views()
        sitting.is_saving = True
        sitting.pending_writes += 1
        self._late[sitting.key] = [room]
        future = self._under_way[sitting.key] = self._vault.save(sitting, caches, beside)
        self._news.hear(future, partial(self._over, sitting, len(sitting.read)))
        return future

    def _over(self, sitting: SessionState, tokens: int, future: Future[SavedCache]) -> None:
        sitting.is_saving = False
        sitting.pending_writes -= 1
        if sitting.chat_cache is not None:
            sitting.chat_cache.caches.end_lending()
        del self._under_way[sitting.key]
        for reservation in self._late.pop(sitting.key):
            reservation.release()
        if future.exception() is None:
            sitting.kept, sitting.failed_write_tokens = future.result(), -1
            self.saved += 1
        else:
            sitting.failed_write_tokens = tokens
        self._ended()


def install_caches(
    sitting: SessionState,
    source: SessionState,
    kept: SavedCache,
    fetched: LoadedCaches,
    room: Reservation,
) -> None:
    """Have caches that came back be those of a session, at rest in host memory.

    Args:
        source, room: as `Tiers.take` has them.

    Raises:
        Damaged: they are not those of a chat; nothing has changed.
    """
    read = source.ids[: kept.tokens]
    if sitting.rule.is_chat:
        restore_chat(sitting, read, fetched.caches, fetched.beside)
    else:
        sitting.parked = offload(fetched.caches[0])
        room.shrink(sitting.parked.nbytes)
    sitting.host, sitting.read, sitting.settled_tokens = room, read, kept.settled_tokens
    sitting.is_coded = kept.is_coded


def _read_only_cache(sitting: SessionState) -> SequenceCache:
    """A session's cache, to be looked at."""
    if sitting.cache is not None:
        return sitting.cache
    assert sitting.parked is not None
    return sitting.parked.shown(sitting.rule.desk.decoder.spec)
