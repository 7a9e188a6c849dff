"""Variants and anchors of contexts in a store: sessions of caches, listed by what they are of.

    index    a session without a cache; its transcript names the sessions of a chunk or a place
    item     a variant, or the change of an anchor; its transcript has what is known beside it

Caches are in the form `blended`, so that none is ever shared as the cache of a prefix, and hold
their entries from position 0 on, rotated as they were.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from larder.cache.chunk_entries import ChunkEntries, ChunkProfile
from larder.cache.sequence import SequenceCache
from larder.core.errors import InputError, LarderError
from larder.core.spec import ModelSpec
from larder.core.types import TokenIds
from larder.prefill.contexts import ChunkChange, ChunkKey, ChunkVariant, anchor_key, variant_key
from larder.store.digests import canonical_json, key_of
from larder.store.model_identity import ModelIdentity
from larder.store.sessions.cache_writer import CacheSnapshot
from larder.store.sessions.session_reader import CacheRequirements, LoadedSession
from larder.store.store import Store

MOST_ITEMS = 20  # of a chunk or a place; the oldest leave. KVCOMM keeps as many anchors
NAME_DIGITS = 32


@dataclass(frozen=True)
class StoredVariants:
    """Variants and anchors of one tenant and one model. Safe from threads and processes: of two
    that are added to one list at a time, one may be left out, and is computed again.

    Args:
        principal: tenant that owns them.
        identity: of the model.
    """

    store: Store
    principal: str
    identity: ModelIdentity

    def variants(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> list[ChunkVariant]:
        """Variants of a chunk behind a prefix, the oldest first."""
        found = list[ChunkVariant]()
        for caches, fields in self._items(spec, variant_key(prefix, ids)):
            [entries] = _entries(caches, fields)
            found.append(ChunkVariant(entries, _profile(fields["profile"])))
        return found

    def add_variant(
        self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds, variant: ChunkVariant
    ) -> None:
        """Store a variant; what cannot be written is counted by the store."""
        fields = {"profile": asdict(variant.profile)}
        key = variant_key(prefix, ids, variant.profile.before)
        self._add(spec, variant_key(prefix, ids), key, ids, [variant.entries], fields)

    def changes(self, spec: ModelSpec, prefix: TokenIds, index: int) -> list[ChunkChange]:
        """Changes of anchors at an index behind a prefix, the oldest first."""
        found = list[ChunkChange]()
        for caches, fields in self._items(spec, anchor_key(prefix, index)):
            *_, change = _entries(caches, fields)  # earlier versions stored the base before it
            found.append(ChunkChange(tuple(fields["ids"]), change))
        return found

    def add_change(
        self, spec: ModelSpec, prefix: TokenIds, index: int, change: ChunkChange
    ) -> None:
        """Store the change of an anchor; what cannot be written is counted by the store."""
        key, sides = anchor_key(prefix, index, (change.ids,)), [change.entries]
        fields = {"ids": list(change.ids)}
        self._add(spec, anchor_key(prefix, index), key, change.ids, sides, fields)

    def _items(
        self, spec: ModelSpec, key: ChunkKey
    ) -> list[tuple[list[SequenceCache], dict[str, Any]]]:
        """Caches and fields of the items of a list, as far as they can be restored."""
        requirements = CacheRequirements(self.identity, str(key[0]), spec.on_host)
        found = list[tuple[list[SequenceCache], dict[str, Any]]]()
        for name in self._names(key):
            try:
                loaded = self.store.sessions.load(self.principal, name, requirements)
            except LarderError:
                continue  # counted by the store
            if loaded is not None and loaded.cache is not None:
                found.append(_item(loaded))
        return found

    def _names(self, key: ChunkKey) -> list[str]:
        """Sessions that a list names."""
        try:
            read = self.store.sessions.read_transcript(self.principal, self._list_name(key))
        except LarderError:
            return []  # counted by the store
        return [] if read is None else list(json.loads(read[1]))

    def _add(
        self,
        spec: ModelSpec,
        listed: ChunkKey,
        key: ChunkKey,
        ids: TokenIds,
        sides: Sequence[ChunkEntries],
        fields: dict[str, Any],
    ) -> None:
        name, text = self._name(key), {**fields, "starts": [side.start for side in sides]}
        cache, *others = (_cache(spec.on_host, side) for side in sides)
        kind = str(key[0])
        snapshot = CacheSnapshot(cache, self.identity, kind, others=tuple(others))
        sessions, parts = self.store.sessions, self.store.parts
        try:
            record = sessions.save(
                self.principal, name, ids, snapshot, transcript=canonical_json(text).encode()
            )
            if not record.spans:  # no room for the caches, which the store has counted
                sessions.remove(self.principal, name)
                return
            names = [each for each in self._names(listed) if each != name] + [name]
            text_of_list = canonical_json(names[-MOST_ITEMS:]).encode()
            sessions.save(self.principal, self._list_name(listed), ids, transcript=text_of_list)
            for dropped in names[:-MOST_ITEMS]:
                with suppress(InputError):  # removed by hand
                    sessions.remove(self.principal, dropped)
        except LarderError as error:
            parts.unwritten.note_error(error)

    def _list_name(self, key: ChunkKey) -> str:
        return f"{self._name(key)} list"

    def _name(self, key: ChunkKey) -> str:
        """Name of the session of a key."""
        return f"{key[0]} {key_of(str(key[0]), self.identity.key, repr(key))[:NAME_DIGITS]}"


def _cache(spec: ModelSpec, entries: ChunkEntries) -> SequenceCache:
    """Cache that holds entries from position 0 on, whatever they were rotated to."""
    cache = SequenceCache(spec, "blended")
    replace(entries.to("cpu"), start=0).append_to(cache)
    return cache


def _item(loaded: LoadedSession) -> tuple[list[SequenceCache], dict[str, Any]]:
    assert loaded.cache is not None
    return [loaded.cache, *loaded.others], json.loads(loaded.transcript or b"{}")


def _entries(caches: Sequence[SequenceCache], fields: dict[str, Any]) -> list[ChunkEntries]:
    """Entries of each cache, at the position where they were read."""
    found = list[ChunkEntries]()
    for cache, start in zip(caches, fields["starts"], strict=True):
        state, count = cache.state(), len(cache.spec.layers)
        keys, values = (
            tuple(state[f"{layer}.{side}"] for layer in range(count)) for side in ("keys", "values")
        )
        found.append(ChunkEntries(keys, values, start))
    return found


def _profile(fields: dict[str, Any]) -> ChunkProfile:
    """Profile from its JSON fields."""
    return ChunkProfile(
        tuple(map(tuple, fields["before"])),
        tuple(map(tuple, fields["inter"])),
        tuple(fields["intra"]),
        tuple(fields["tokens"]),
    )
