"""Caches in the store: written while others are answered, verified when they come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from larder.cache.sequence import SequenceCache
from larder.core.errors import LarderError, Refused
from larder.engine.snapshots import ModelSnapshots
from larder.server.persistence.base import Durability
from larder.server.persistence.store import StoreSessionPersistence, saved_cache
from larder.server.session_info import session_info
from larder.server.session_state import SavedCache, SessionState
from larder.store.blobs.payloads import is_lossless_codec
from larder.store.ledger import UNLIMITED, Tier

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
            "settled": str(sitting.settled),
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
                snapshot = self._snapshots.of(policy, caches, beside)
                with self._snapshots.store.turns.prepared(sitting.tenant, ids, snapshot) as made:
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
            if found.ids[: found.record.read_tokens] != ids:
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
        self._snapshots.note_reading(tokens, seconds)

    def seconds_to_read(self, tokens: int) -> float:
        seconds = self._parts.rates.read_seconds(tokens)
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
