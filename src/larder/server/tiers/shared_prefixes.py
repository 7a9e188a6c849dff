"""Prefixes that sessions of one tenant share on the device: one storage, reserved once.

A session that starts from the cache of another holds the storage of the common prefix with it, and
reserves only what it will hold alone. One that leaves the device frees what it held alone; the
bytes of a prefix pass to the last session that holds it. Where the form of the cache shares
nothing (pages of an arena, latents, quantized entries), a session copies the prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from larder.cache.prefix_forks import divide, fork_prefix, prefix_nbytes, shared_storages
from larder.cache.sequence import SequenceCache
from larder.cache.shared_storage import SHORT_SEGMENT
from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations

TABLE_BYTES = 16  # of the start and the length of a head in a storage


class SharedPrefixes:
    """Prefixes that are shared on the device. For the model's thread.

    Args:
        on_device: sessions with a cache on the device, by key.
    """

    def __init__(
        self, on_device: Mapping[int, SessionState], reservations: DeviceReservations
    ) -> None:
        self._on_device, self._reservations = on_device, reservations

    def shareable_bytes(self, source: SessionState, length: int) -> int:
        """Bytes that a session would share with another one of the same prefix; 0 if it has to copy
        them.
        """
        cache = source.residency.active
        if cache is None or length < SHORT_SEGMENT or not self.can_divide(source):
            return 0
        return prefix_nbytes(cache, length)

    def can_divide(self, session: SessionState) -> bool:
        """True if no cache with the same storage is being written, which must not change."""
        sharers = [self._on_device[key] for key in self._reservations.sharers(session.key)]
        return not any(each.residency.is_saving for each in sharers)

    def table_bytes(self, source: SessionState) -> int:
        """Bytes that tables of storages take in addition, if one more session shares a prefix."""
        cache = source.residency.active
        assert cache is not None
        heads = sum(store.layer.kv_heads for store in cache.layers)
        sharers = len(self._reservations.sharers(source.key)) + 1
        held = max(store.num_storages for store in cache.layers)
        return TABLE_BYTES * heads * (2 * sharers + held)

    def fork(self, source: SessionState, session: SessionState, length: int) -> SequenceCache:
        """Cache of a session, for which all but what it shares is reserved, and the tables."""
        assert source.residency.active is not None
        before = self._held_bytes(source)
        copy = fork_prefix(source.residency.active, length)
        changes = self._changes(before)
        shared = shared_storages(copy)
        changes[session.key] = sum(shared.values()) - sum(changes.values())
        self._reservations.share(self._storages(before) | {session.key: shared}, changes)
        return copy

    def can_truncate(self, session: SessionState, length: int) -> bool:
        """True if the cache of a session can be truncated to `length` now."""
        return not self._bytes_behind(session, length) or self.can_divide(session)

    def divergence_bytes(self, session: SessionState, length: int) -> int:
        """Bytes that a session has to reserve before it is truncated to `length`: it then holds
        alone what it shared behind that.
        """
        behind = self._bytes_behind(session, length)
        return behind + self.table_bytes(session) if behind else 0

    def truncate(self, session: SessionState, length: int) -> None:
        """Truncate the cache of a session, for which the bytes behind and tables are reserved."""
        cache = session.residency.active
        assert cache is not None
        before, behind = self._held_bytes(session), self._bytes_behind(session, length)
        if behind:
            divide(cache, length)
        cache.truncate(length)
        changes = self._changes(before)
        del changes[session.key]
        changes[session.key] = -behind - sum(changes.values())
        self._reservations.share(self._storages(before), changes)

    def note(self, session: SessionState) -> None:
        """Note what a session shares, after its cache has changed."""
        cache = session.residency.active
        self._reservations.share({session.key: {} if cache is None else shared_storages(cache)})

    @contextmanager
    def staying(self, source: SessionState) -> Iterator[None]:
        """Context in which a session stays on the device."""
        before, source.usage.is_running = source.usage.is_running, True
        try:
            yield
        finally:
            source.usage.is_running = before

    def _bytes_behind(self, session: SessionState, length: int) -> int:
        """Bytes behind a prefix that a session shares."""
        cache = session.residency.active
        if cache is None:
            return 0
        shared = max(store.shared_length for store in cache.layers)
        return prefix_nbytes(cache, shared) - prefix_nbytes(cache, min(shared, length))

    def _held_bytes(self, session: SessionState) -> dict[int, int]:
        """Bytes of the caches that share storage with one, its own among them."""
        keys = self._reservations.sharers(session.key)
        return {key: self._on_device[key].residency.device_bytes for key in keys}

    def _changes(self, before: Mapping[int, int]) -> dict[int, int]:
        """Bytes by which caches have grown."""
        return {
            key: self._on_device[key].residency.device_bytes - count
            for key, count in before.items()
        }

    def _storages(self, keys: Mapping[int, int]) -> dict[int, dict[object, int]]:
        """Storages that caches share."""
        held = dict[int, dict[object, int]]()
        for key in keys:
            cache = self._on_device[key].residency.active
            held[key] = {} if cache is None else shared_storages(cache)
        return held


def copied_prefix(source: SessionState, length: int) -> SequenceCache:
    """Copy of the first `length` tokens of the cache of a session, on any tier."""
    assert source.residency.caches is not None
    cache = source.residency.caches.fork(0)
    if length < cache.next_position:
        cache.truncate(length)
        cache.compact()
    cache.separate()
    return cache
