"""Caches of sessions written to blobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.errors import Damaged, InputError, Refused
from larder.store.blobs.blob_store import BlobRef
from larder.store.blobs.cache_state import (
    RAW_CODEC,
    is_lossless_cache,
    slice_chunk,
    slice_rest,
    split_layers,
    state_nbytes,
)
from larder.store.blobs.payloads import (
    add_owner,
    decode_token_log,
    encode_chunk,
    encode_snapshot,
    is_lossless_codec,
)
from larder.store.blobs.tenant_blobs import BlobTransaction, TenantBlobs
from larder.store.codecs.base import codec_named
from larder.store.ledger import Tier
from larder.store.model_identity import ModelIdentity
from larder.store.prefix import chunk_index
from larder.store.prefix.chunk_index import ChunkIndex
from larder.store.prefix.chunk_records import (
    PrefixChunk,
    prefix_digest,
    token_bytes,
    token_ids_from_bytes,
)
from larder.store.sessions.chunk_stream import StreamedChunk, can_stream, chunk_slices, chunks_of
from larder.store.sessions.records import Record, StoredCache


@dataclass(frozen=True)
class CacheSnapshot:
    """Cache to be stored, with the model and policy that made it.

    Args:
        cache: it is read, not changed.
        identity: of the model.
        policy: canonical spelling, sizes filled in.
        codec: name of the codec of keys and values, a file in `store/codecs`.
        others: further caches of the same session, each of which has read some of its tokens.
        beside: further state of the session; None for none.
    """

    cache: SequenceCache
    identity: ModelIdentity
    policy: str
    codec: str = RAW_CODEC
    others: tuple[SequenceCache, ...] = ()
    beside: bytes | None = None

    @property
    def split_caches(self) -> tuple[CacheSnapshot, ...]:
        """One snapshot per cache."""
        bare = replace(self, others=(), beside=None)
        return tuple(replace(bare, cache=cache) for cache in (self.cache, *self.others))

    def has_origin_of(self, record: Record) -> bool:
        """True if the caches of a record are of the same model, policy and codec."""
        own = self.identity.to_dict(), self.policy, self.codec
        return own == (record.identity, record.policy, record.codec)


def check_snapshot(ids: Sequence[int], snapshot: CacheSnapshot | None) -> None:
    """Check that the caches of a snapshot match their tokens.

    Raises:
        InputError: it has read more or fewer; of several, more.
        UnknownName: there is no such codec.
    """
    if snapshot is None:
        return
    is_lossless_codec(snapshot.codec)
    longest = max(each.cache.next_position for each in snapshot.split_caches)
    if longest > len(ids) or (not snapshot.others and longest < len(ids)):
        raise InputError(
            f"The cache has read {longest} tokens, but {len(ids)} are to be "
            "saved with it: give exactly the tokens that it has read."
        )


@dataclass(frozen=True)
class CacheBlobs:
    """Blobs of the caches of one snapshot.

    Args:
        spans: blobs of all caches, in order.
        cache_bytes: bytes of their tensors.
        others: caches after the first.
        beside: blob of the further state of the session.
    """

    snapshot: CacheSnapshot
    spans: tuple[BlobRef, ...]
    cache_bytes: int
    others: tuple[StoredCache, ...] = ()
    beside: BlobRef | None = None

    def add_to(self, record: Record) -> Record:
        """Copy of a record with these caches."""
        snapshot = self.snapshot
        return replace(
            record,
            identity=snapshot.identity.to_dict(),
            policy=snapshot.policy,
            codec=snapshot.codec,
            cache=snapshot.cache.meta(),
            spans=self.spans,
            cache_bytes=self.cache_bytes,
            lossless=is_lossless_codec(snapshot.codec),
            others=self.others,
            beside=self.beside,
        )


@dataclass(frozen=True)
class StagedCache:
    """Cache whose blobs are written, and pinned until the end of a context.

    Args:
        ids: tokens that it has read.
        transaction: of the blobs.
    """

    ids: tuple[int, ...]
    blobs: CacheBlobs
    transaction: BlobTransaction


def is_shareable(snapshot: CacheSnapshot) -> bool:
    """True if a cache is stored as shareable prefix chunks; only a single cache is."""
    return (
        is_lossless_codec(snapshot.codec)
        and not snapshot.others
        and is_lossless_cache(snapshot.cache)
    )


def with_stored_codec(snapshot: CacheSnapshot) -> CacheSnapshot:
    """Snapshot with the codec that its caches are stored with: chunks at several levels need a
    single cache that can be restored chunk by chunk."""
    codec = codec_named(snapshot.codec)
    if not codec.levels or (not snapshot.others and can_stream(snapshot.cache)):
        return snapshot
    return replace(snapshot, codec=codec.unstreamed)


def with_stored_form(snapshot: CacheSnapshot) -> tuple[CacheSnapshot, int]:
    """Snapshot of the caches in the form that they are stored in, and the bytes of copies."""
    codec, caches = codec_named(snapshot.codec), (snapshot.cache, *snapshot.others)
    first, *others = held = [codec.stored_form(cache) for cache in caches]
    pairs = zip(held, caches, strict=True)
    copied = sum(copy.nbytes for copy, cache in pairs if copy is not cache)
    return replace(snapshot, cache=first, others=tuple(others)), copied


class CacheWriter:
    """Writer of caches as blobs. Safe from threads."""

    def __init__(self, blobs: TenantBlobs, chunks: ChunkIndex) -> None:
        self._blobs, self._chunks = blobs, chunks

    def snapshot(
        self,
        transaction: BlobTransaction,
        ids: Sequence[int],
        snapshot: CacheSnapshot,
        records: Sequence[Record] = (),
    ) -> CacheBlobs:
        """Write caches. A single lossless cache is written as shared chunks first.

        Args:
            records: newest states of the session, and of one that its cache began with. Their
                chunks at several levels stay as they are: what was loaded of them may be coarser
                than their finest level.

        Raises:
            BudgetError, StoreError: they cannot be stored.
        """
        is_chunked, snapshot = is_shareable(snapshot), with_stored_codec(snapshot)
        common = [self._common_chunks(record, ids, snapshot) for record in records]
        stored = max(common, key=len, default=[])
        chunks = len(ids) // chunk_index.CHUNK_TOKENS if is_chunked else 0
        with self._blobs.reserve_metadata(chunks):
            return self._write_caches(transaction, ids, snapshot, is_chunked, stored)

    def _write_caches(
        self,
        transaction: BlobTransaction,
        ids: Sequence[int],
        snapshot: CacheSnapshot,
        is_chunked: bool,
        stored: Sequence[StreamedChunk],
    ) -> CacheBlobs:
        """Write caches, as shared chunks first where they are chunked."""
        caches, spans = list[StoredCache](), list[BlobRef]()
        ledger, tenant = self._blobs.ledger, transaction.tenant
        with ledger.reserve(Tier.HOST, tenant, _form_bytes(snapshot)):
            snapshot, copied = with_stored_form(snapshot)
        with ledger.reserve(Tier.HOST, tenant, copied):
            for each in snapshot.split_caches:
                refs, cache_bytes = self._write_cache(transaction, ids, each, is_chunked, stored)
                caches.append(StoredCache(each.cache.meta(), len(refs), cache_bytes))
                spans += refs
        beside = None
        if snapshot.beside is not None:
            beside = transaction.put(add_owner(snapshot.beside, transaction.tenant))
        total = sum(cache.cache_bytes for cache in caches)
        return CacheBlobs(snapshot, tuple(spans), total, tuple(caches[1:]), beside)

    def _common_chunks(
        self, newest: Record, ids: Sequence[int], snapshot: CacheSnapshot
    ) -> list[StreamedChunk]:
        """Chunks at several levels that a session has of the beginning of a text."""
        if not newest.spans or not snapshot.has_origin_of(newest):
            return []
        if not codec_named(newest.codec).levels:
            return []
        try:
            log = self._blobs.get(newest.tokens, newest.tenant)
            own = decode_token_log(log, newest.num_tokens, newest.tenant, newest.session)
            chunks = chunks_of(newest)
        except (Damaged, Refused):
            return []
        text = tuple(ids)
        return list(
            takewhile(lambda at: own[at.start : at.stop] == text[at.start : at.stop], chunks)
        )

    def _write_cache(
        self,
        transaction: BlobTransaction,
        ids: Sequence[int],
        snapshot: CacheSnapshot,
        is_chunked: bool,
        stored: Sequence[StreamedChunk],
    ) -> tuple[list[BlobRef], int]:
        """Write one cache; return its blobs and the bytes of its tensors."""
        cache, tenant = snapshot.cache, transaction.tenant
        with self._blobs.ledger.reserve(Tier.HOST, tenant, _host_bytes(cache)):
            state = cache.state()
            count, refs = state_nbytes(state), []
            if is_chunked:
                shared = self._write_chunks(transaction, ids, state, snapshot.identity)
                refs = [chunk.ref for chunk in shared]
                state = slice_rest(state, shared[-1].stop if shared else 0)
            if codec_named(snapshot.codec).levels:
                return self._write_levels(transaction, ids, state, snapshot, stored), count
            for part in split_layers(state, codec_named(snapshot.codec)):
                data = encode_snapshot(
                    part, tenant, snapshot.identity, snapshot.policy, snapshot.codec, cache.spec
                )
                refs.append(transaction.put(data))
        return refs, count

    def _write_levels(
        self,
        transaction: BlobTransaction,
        ids: Sequence[int],
        state: Mapping[str, Tensor],
        snapshot: CacheSnapshot,
        stored: Sequence[StreamedChunk],
    ) -> list[BlobRef]:
        """Write the chunks of a cache that are not stored, each at every level of the codec."""
        spec, owner = snapshot.cache.spec, (transaction.tenant, snapshot.identity, snapshot.policy)
        there, refs = dict[tuple[object, object], tuple[BlobRef, ...]](), list[BlobRef]()
        there |= {(each.start, each.stop - each.start): each.refs for each in stored}
        for part, span in chunk_slices(state, ids):
            found = there.get((span["start"], span["n_tokens"]), ())
            if found and all([transaction.retain(ref) for ref in found]):
                refs += found
                continue
            for level in codec_named(snapshot.codec).levels:
                refs.append(transaction.put(encode_snapshot(part, *owner, level, spec, span)))
        return refs

    def chunks(
        self,
        transaction: BlobTransaction,
        ids: Sequence[int],
        cache: SequenceCache,
        identity: ModelIdentity,
        least: int | None = None,
    ) -> int:
        """Store the prefix of a lossless cache for other sessions; return the tokens stored.

        Args:
            least: fewest tokens of the last chunk, at most those of a full one; None for those.

        Raises:
            BudgetError, StoreError: they cannot be stored.
        """
        if not is_lossless_cache(cache):
            return 0
        with self._blobs.ledger.reserve(Tier.HOST, transaction.tenant, _host_bytes(cache)):
            chunks = self._write_chunks(transaction, ids, cache.state(), identity, least)
        return chunks[-1].stop if chunks else 0

    def _write_chunks(
        self,
        transaction: BlobTransaction,
        ids: Sequence[int],
        state: Mapping[str, Tensor],
        identity: ModelIdentity,
        least: int | None = None,
    ) -> list[PrefixChunk]:
        """Write the chunks of a text; existing ones of full length are not written again."""
        size, tenant = chunk_index.CHUNK_TOKENS, transaction.tenant
        shared = self._chunks.match_prefix(tenant, identity.key, ids)
        whole = (each.chunk for each in shared if each.tokens == size)
        found = list(takewhile(lambda chunk: transaction.retain(chunk.ref), whole))
        least = size if least is None else least
        for start in range(size * len(found), len(ids) - least + 1, size):
            stop = min(start + size, len(ids))
            span = {
                "start": start,
                "n_tokens": stop - start,
                "tokens": token_ids_from_bytes(token_bytes(ids[start:stop])),
                "prefix": prefix_digest(ids[:stop]),
            }
            ref = transaction.put(
                encode_chunk(slice_chunk(state, start, stop), tenant, identity, span)
            )
            above = found[-1] if found else None
            added = self._chunks.add(tenant, identity.key, above, ids[:stop], ref)
            if added is None:  # its parent has just been deleted with its last session
                break
            found.append(added)
        return found


def _form_bytes(snapshot: CacheSnapshot) -> int:
    """Peak host bytes while caches are brought into the form that they are stored in."""
    if not codec_named(snapshot.codec).has_own_form:
        return 0
    counts = [each.cache.nbytes for each in snapshot.split_caches]
    return sum(counts) + max(counts)


def _host_bytes(cache: SequenceCache) -> int:
    """Peak host bytes of a save: a copy of the state and the blob being written."""
    return 2 * cache.nbytes
