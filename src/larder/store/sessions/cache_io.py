"""A session's state on its way to the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import InputError
from larder.store.blobs.blob_store import BlobRef
from larder.store.blobs.budgeted_blobs import BlobTransaction, BudgetedBlobs
from larder.store.blobs.cache_state import RAW_CODEC, state_nbytes
from larder.store.blobs.payloads import add_owner, encode_chunk, encode_snapshot, is_lossless_codec
from larder.store.ledger import Tier
from larder.store.model_identity import ModelIdentity
from larder.store.pieces import is_lossless_cache, slice_chunk, slice_rest, split_layers
from larder.store.prefix import chunk_index
from larder.store.prefix.chunk_index import ChunkIndex
from larder.store.prefix.chunk_records import PrefixChunk
from larder.store.sessions.records import StoredCache
from larder.store.wording import prefix_digest, token_bytes, token_ids_from_bytes


@dataclass(frozen=True)
class CacheSnapshot:
    """A cache that is to outlive the process, and what made it.

    Args:
        cache: it is read, not changed.
        identity: of the model.
        policy: canonical spelling, sizes filled in.
        codec: how keys and values are spelled; a file in `store/codecs`.
        others: further caches of the same session, each of which has read some of its tokens.
        beside: what they do not say of their session; None for nothing.
    """

    cache: SequenceCache
    identity: ModelIdentity
    policy: str
    codec: str = RAW_CODEC
    others: tuple[SequenceCache, ...] = ()
    beside: bytes | None = None

    @property
    def each(self) -> tuple[CacheSnapshot, ...]:
        """Per cache, a snapshot of it alone."""
        bare = replace(self, others=(), beside=None)
        return tuple(replace(bare, cache=cache) for cache in (self.cache, *self.others))


def check_snapshot(ids: Sequence[int], snapshot: CacheSnapshot | None) -> None:
    """See that a cache is that of its tokens, or one of several that share them.

    Raises:
        InputError: it has read more or fewer; of several, more.
        UnknownName: there is no such codec.
    """
    if snapshot is None:
        return
    is_lossless_codec(snapshot.codec)
    longest = max(each.cache.next_position for each in snapshot.each)
    if longest > len(ids) or (not snapshot.others and longest < len(ids)):
        raise InputError(
            f"The cache has read {longest} tokens, but {len(ids)} are to be "
            "saved with it: give exactly those that it has read."
        )


@dataclass(frozen=True)
class CacheBlobs:
    """A cache as blobs.

    Args:
        spans: its blobs, in order.
        cache_bytes: of its tensors.
        lossless: whether it comes back to the bit.
        others: caches behind the first, where there are several.
        beside: the blob of what is told beside them.
    """

    spans: tuple[BlobRef, ...]
    cache_bytes: int
    lossless: bool
    others: tuple[StoredCache, ...] = ()
    beside: BlobRef | None = None


def is_shareable(snapshot: CacheSnapshot) -> bool:
    """Whether a cache is kept in chunks that others may share; of several none is."""
    return (
        is_lossless_codec(snapshot.codec)
        and not snapshot.others
        and is_lossless_cache(snapshot.cache)
    )


class CacheWriter:
    """Writes caches as blobs. Safe from threads."""

    def __init__(self, shelves: BudgetedBlobs, chunks: ChunkIndex) -> None:
        self._shelves, self._chunks = shelves, chunks

    def snapshot(
        self, saving: BlobTransaction, tenant: str, ids: Sequence[int], snapshot: CacheSnapshot
    ) -> CacheBlobs:
        """Write caches. A single one that is whole goes as chunks first, which are shared.

        Raises:
            BudgetError, StoreError: they cannot be kept.
        """
        chunked = is_shareable(snapshot)
        made = [self._one(saving, tenant, ids, each, chunked) for each in snapshot.each]
        held = [
            StoredCache(each.cache.meta(), len(refs), count)
            for each, (refs, count) in zip(snapshot.each, made, strict=True)
        ]
        spans = tuple(ref for refs, _ in made for ref in refs)
        total = sum(count for _, count in made)
        beside = snapshot.beside
        told = None if beside is None else saving.put(add_owner(beside, tenant))
        return CacheBlobs(spans, total, is_lossless_codec(snapshot.codec), tuple(held[1:]), told)

    def _one(
        self,
        saving: BlobTransaction,
        tenant: str,
        ids: Sequence[int],
        snapshot: CacheSnapshot,
        chunked: bool,
    ) -> tuple[list[BlobRef], int]:
        """The blobs of one cache, and the bytes of its tensors."""
        cache = snapshot.cache
        with self._shelves.ledger.reserve(Tier.HOST, tenant, _host_bytes(cache)):
            state = cache.state()
            count, refs = state_nbytes(state), []
            if chunked:
                shared = self._chunked(saving, tenant, ids, state, snapshot.identity)
                refs = [chunk.ref for chunk in shared]
                state = slice_rest(state, shared[-1].stop if shared else 0)
            layers = len(cache.spec.layers)
            own = tenant, snapshot.identity, snapshot.policy, snapshot.codec, layers
            refs += [saving.put(encode_snapshot(part, *own)) for part in split_layers(state)]
        return refs, count

    def chunks(
        self,
        saving: BlobTransaction,
        tenant: str,
        ids: Sequence[int],
        cache: SequenceCache,
        who: ModelIdentity,
    ) -> int:
        """Keep the beginning of a whole cache for other sessions; the tokens that are kept.

        Raises:
            BudgetError, StoreError: they cannot be kept.
        """
        if not is_lossless_cache(cache):
            return 0
        with self._shelves.ledger.reserve(Tier.HOST, tenant, _host_bytes(cache)):
            made = self._chunked(saving, tenant, ids, cache.state(), who)
        return made[-1].stop if made else 0

    def _chunked(
        self,
        saving: BlobTransaction,
        tenant: str,
        ids: Sequence[int],
        state: Mapping[str, Tensor],
        identity: ModelIdentity,
    ) -> list[PrefixChunk]:
        """The chunks of a text; those that are kept already are not written again."""
        size = chunk_index.CHUNK_TOKENS
        shared = self._chunks.longest(tenant, identity.key, ids)
        whole = (each.chunk for each in shared if each.tokens == size)
        found = list(takewhile(lambda chunk: saving.stays(chunk.ref), whole))
        for start in range(size * len(found), len(ids) - size + 1, size):
            stop = start + size
            span = {
                "start": start,
                "n_tokens": size,
                "tokens": token_ids_from_bytes(token_bytes(ids[start:stop])),
                "prefix": prefix_digest(ids[:stop]),
            }
            ref = saving.put(encode_chunk(slice_chunk(state, start, stop), tenant, identity, span))
            above = found[-1] if found else None
            added = self._chunks.add(tenant, identity.key, above, ids[:stop], ref)
            if added is None:  # what it continues has just left with the last session of it
                break
            found.append(added)
        return found


def _host_bytes(cache: SequenceCache) -> int:
    """Bytes that saving holds beside the cache: a copy of its state, and the blob in the making."""
    return 2 * cache.nbytes
