"""Persistent store of sessions and prefixes, by tenant, verified when read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from larder.cache.sequence import SequenceCache
from larder.core.errors import Damaged, LarderError, Refused
from larder.core.spec import ModelSpec
from larder.store.components import StoreComponents
from larder.store.fs.base import FileSystem
from larder.store.ledger import Tier
from larder.store.maintenance import StoreMaintenance
from larder.store.model_identity import ModelIdentity
from larder.store.prefix import chunk_index
from larder.store.prefix.chunk_records import ChunkMatch
from larder.store.sessions.cache_writer import CacheSnapshot, check_snapshot
from larder.store.sessions.session_store import SessionStore
from larder.store.throughput import RestorePath


class PrefixStore:
    """Caches of prefixes by their tokens. Safe from threads and processes."""

    def __init__(self, parts: StoreComponents) -> None:
        self._parts = parts

    def save(
        self, principal: str, ids: Sequence[int], cache: SequenceCache, identity: ModelIdentity
    ) -> int:
        """Store a prefix for the tenant's other sessions; return the number of tokens stored.

        It is retained, with or without sessions that refer to it, until it is evicted.
        Only lossless caches are stored; for others the result is 0.

        Raises:
            BudgetError, StoreFull, StoreSlow: it cannot be stored.
        """
        return self._save(principal, ids, cache, identity, chunk_index.CHUNK_TOKENS)

    def save_text(
        self, principal: str, ids: Sequence[int], cache: SequenceCache, identity: ModelIdentity
    ) -> int:
        """Store a whole text as `save` does, with a shorter chunk at its end.

        Other machines than the writer find the chunks of full length only.
        """
        return self._save(principal, ids, cache, identity, 1)

    def _save(
        self,
        principal: str,
        ids: Sequence[int],
        cache: SequenceCache,
        identity: ModelIdentity,
        least: int,
    ) -> int:
        """Store the chunks of a text, the last one if it has at least `least` tokens."""
        check_snapshot(ids, CacheSnapshot(cache, identity, ""))
        tenant = self._parts.tenant(principal)
        chunks = -(-len(ids) // chunk_index.CHUNK_TOKENS)
        with (
            self._parts.blobs.reserve_metadata(chunks),
            self._parts.blobs.saving(tenant) as transaction,
        ):
            count = self._parts.writer.chunks(transaction, ids, cache, identity, least)
            self._parts.chunks.keep(tenant, identity.key, ids[:count])
        return count

    def match_prefix(
        self, principal: str, ids: Sequence[int], identity: ModelIdentity, spec: ModelSpec
    ) -> SequenceCache | None:
        """Cache of the longest stored prefix of a text; None if there is none.

        The text's last token is left out: it must be read for what comes next.
        """
        parts, tenant = self._parts, self._parts.tenant(principal)

        def unusable(match: ChunkMatch, error: LarderError) -> None:
            parts.refusals.note_error(error)
            if isinstance(error, Damaged | Refused):
                dropped = parts.chunks.drop(match.chunk, tenant)
                parts.blobs.drop(chunk.ref for chunk in dropped)

        try:
            shared = parts.chunks.match_prefix(tenant, identity.key, ids[: max(len(ids) - 1, 0)])
            if not shared:
                return None
            stored = sum(each.chunk.ref.bytes for each in shared)
            tokens = sum(each.tokens for each in shared)
            if parts.throughput.choose(Tier.DISK, stored, tokens) is not RestorePath.LOAD:
                raise Refused("Prefill is faster than loading the cache.", "slower")
            cache = parts.reader.prefix(tenant, shared, ids, identity, spec, unusable)
            with parts.unwritten.suppressed():
                parts.chunks.used(shared)
        except LarderError as error:
            parts.refusals.note_error(error)
            return None
        return cache


class Store:
    """Persistent store of sessions and prefixes. Safe from threads and processes.

    Args:
        url, home, options: as `StoreComponents` takes them.
    """

    def __init__(self, url: str | FileSystem, home: Path, **options: Any) -> None:
        self.parts = StoreComponents(url, home, **options)
        self.sessions = SessionStore(self.parts)
        self.prefixes = PrefixStore(self.parts)
        self.maintenance = StoreMaintenance(self.parts)

    def close(self) -> None:
        """Close the index."""
        self.parts.close()
