"""Contexts of prompts in a store: private to a tenant, verified, for later processes.

The chunk of a context is read behind a prefix, so it is the end of a text that was read whole: the
store holds it among the prefixes of the tenant, with digests of model, tokenizer, RoPE and tokens.
"""

from __future__ import annotations

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.errors import LarderError
from larder.core.home import LOCAL_PRINCIPAL
from larder.core.spec import ModelSpec
from larder.engine.snapshots import identity_of_model
from larder.models.loader import LoadedModel
from larder.prefill.contexts import ChunkSource
from larder.store.store import Store

NO_TOKEN = 0  # stands behind a chunk: a store never answers with the last token of a text


class StoreChunks(ChunkSource):
    """Chunks of one tenant and one model in a store. Safe from threads and processes.

    What cannot be written is counted by the store, and read again the next time.

    Args:
        principal: tenant that owns the chunks.

    Examples:
        >>> chunks = StoreChunks(store, engine.loaded)
        >>> memory = engine.under("cacheblend").read(contexts=texts, chunks=chunks)
    """

    def __init__(self, store: Store, loaded: LoadedModel, principal: str = LOCAL_PRINCIPAL) -> None:
        self._store, self._principal = store, principal
        self._identity = identity_of_model(loaded)

    def find(
        self, spec: ModelSpec, prefix: tuple[int, ...], ids: tuple[int, ...]
    ) -> ChunkEntries | None:
        text = prefix + ids
        cache = self._store.prefixes.match_prefix(
            self._principal, (*text, NO_TOKEN), self._identity, spec
        )
        if cache is None or cache.next_position < len(text):
            return None
        return ChunkEntries.of(cache, len(prefix), len(text))

    def add(self, prefix: tuple[int, ...], ids: tuple[int, ...], cache: SequenceCache) -> None:
        try:
            self._store.prefixes.save_text(self._principal, prefix + ids, cache, self._identity)
        except LarderError as error:
            self._store.parts.unwritten.note_error(error)
