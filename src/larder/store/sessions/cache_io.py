"""Caches written to blobs and read back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.cache.spec import CacheForm, CacheSpec
from larder.core.errors import CacheError, Damaged, InputError, LarderError, Refused
from larder.core.spec import ModelSpec
from larder.store.blobs.blob_store import BlobRef
from larder.store.blobs.cache_state import (
    RAW_CODEC,
    check_fits,
    is_lossless_cache,
    join_chunks,
    slice_chunk,
    slice_rest,
    split_layers,
    state_nbytes,
)
from larder.store.blobs.container import peek_metadata
from larder.store.blobs.payloads import (
    CHUNK_KIND,
    SNAPSHOT_KIND,
    add_owner,
    decode_cache_blob,
    decode_token_log,
    encode_chunk,
    encode_snapshot,
    is_lossless_codec,
    strip_owner,
)
from larder.store.blobs.tenant_blobs import BlobTransaction, TenantBlobs
from larder.store.ledger import Tier
from larder.store.model_identity import ModelIdentity
from larder.store.prefix import chunk_index
from larder.store.prefix.chunk_index import ChunkIndex
from larder.store.prefix.chunk_records import (
    ChunkMatch,
    PrefixChunk,
    PrefixDigest,
    prefix_digest,
    token_bytes,
    token_ids_from_bytes,
)
from larder.store.sessions.records import Record, StoredCache
from larder.store.throughput import ThroughputEstimates


@dataclass(frozen=True)
class CacheSnapshot:
    """Cache to be stored, with the model and policy that made it.

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
        """One snapshot per cache."""
        bare = replace(self, others=(), beside=None)
        return tuple(replace(bare, cache=cache) for cache in (self.cache, *self.others))


def check_snapshot(ids: Sequence[int], snapshot: CacheSnapshot | None) -> None:
    """Check that the caches of a snapshot match their tokens.

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
            "saved with it: give exactly the tokens that it has read."
        )


@dataclass(frozen=True)
class CacheBlobs:
    """Blobs of the caches of one snapshot.

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
    """True if a cache is stored as shareable prefix chunks; only a single cache is."""
    return (
        is_lossless_codec(snapshot.codec)
        and not snapshot.others
        and is_lossless_cache(snapshot.cache)
    )


class CacheWriter:
    """Writer of caches as blobs. Safe from threads."""

    def __init__(self, blobs: TenantBlobs, chunks: ChunkIndex) -> None:
        self._blobs, self._chunks = blobs, chunks

    def snapshot(
        self, saving: BlobTransaction, tenant: str, ids: Sequence[int], snapshot: CacheSnapshot
    ) -> CacheBlobs:
        """Write caches. A single lossless cache is written as shared chunks first.

        Raises:
            BudgetError, StoreError: they cannot be kept.
        """
        chunked = is_shareable(snapshot)
        made = [self._write_cache(saving, tenant, ids, each, chunked) for each in snapshot.each]
        held = [
            StoredCache(each.cache.meta(), len(refs), count)
            for each, (refs, count) in zip(snapshot.each, made, strict=True)
        ]
        spans = tuple(ref for refs, _ in made for ref in refs)
        total = sum(count for _, count in made)
        beside = snapshot.beside
        told = None if beside is None else saving.put(add_owner(beside, tenant))
        return CacheBlobs(spans, total, is_lossless_codec(snapshot.codec), tuple(held[1:]), told)

    def _write_cache(
        self,
        saving: BlobTransaction,
        tenant: str,
        ids: Sequence[int],
        snapshot: CacheSnapshot,
        chunked: bool,
    ) -> tuple[list[BlobRef], int]:
        """Write one cache; return its blobs and the bytes of its tensors."""
        cache = snapshot.cache
        with self._blobs.ledger.reserve(Tier.HOST, tenant, _host_bytes(cache)):
            state = cache.state()
            count, refs = state_nbytes(state), []
            if chunked:
                shared = self._write_chunks(saving, tenant, ids, state, snapshot.identity)
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
        """Store the prefix of a lossless cache for other sessions; return the tokens stored.

        Raises:
            BudgetError, StoreError: they cannot be kept.
        """
        if not is_lossless_cache(cache):
            return 0
        with self._blobs.ledger.reserve(Tier.HOST, tenant, _host_bytes(cache)):
            made = self._write_chunks(saving, tenant, ids, cache.state(), who)
        return made[-1].stop if made else 0

    def _write_chunks(
        self,
        saving: BlobTransaction,
        tenant: str,
        ids: Sequence[int],
        state: Mapping[str, Tensor],
        identity: ModelIdentity,
    ) -> list[PrefixChunk]:
        """Write the chunks of a text; existing ones are not written again."""
        size = chunk_index.CHUNK_TOKENS
        shared = self._chunks.match_prefix(tenant, identity.key, ids)
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
    """Peak host bytes of a save: a copy of the state and the blob being written."""
    return 2 * cache.nbytes


CacheTensors = dict[str, Tensor]
READ_THREADS = 4  # blobs that are read and verified at once
MAX_PREFETCHED_BLOBS = 8  # blobs in memory, the one that is used included


class SessionReader:
    """Reader of token logs, transcripts and caches from blobs. Safe from threads."""

    def __init__(self, blobs: TenantBlobs, rates: ThroughputEstimates) -> None:
        self._blobs, self._ledger, self._rates = blobs, blobs.ledger, rates

    def ids(self, record: Record) -> tuple[int, ...]:
        """Token ids of a session.

        Raises:
            Damaged, Refused: their log is none, or another's.
        """
        data = self._blobs.get(record.tokens, record.tenant)
        return decode_token_log(data, record.num_tokens, record.tenant, record.session)

    def transcript(self, record: Record) -> bytes:
        """Transcript of a session.

        Raises:
            Damaged, Refused: it is not what was written, or another's.
        """
        if record.transcript is None:
            raise Damaged("The session was saved without a transcript.")
        data = self._blobs.get(record.transcript, record.tenant)
        return strip_owner(data, record.tenant, record.session)

    def beside(self, record: Record) -> bytes | None:
        """Extra state saved with a session's caches; None if there is none.

        Raises:
            Damaged, Refused: it is not what was written, or another's.
        """
        if record.beside is None:
            return None
        return strip_owner(self._blobs.get(record.beside, record.tenant), record.tenant)

    def for_session(self, record: Record, session: str) -> dict[str, bytes]:
        """Token log and transcript re-encoded for another session of the tenant, by part.

        Raises:
            Damaged, Refused: it is not what was written, or another's.
        """
        tenant, parts = record.tenant, {"tokens": record.tokens}
        if record.transcript is not None:
            parts["transcript"] = record.transcript
        data = {part: self._blobs.get(ref, tenant) for part, ref in parts.items()}
        return {
            part: add_owner(strip_owner(each, tenant, record.session), tenant, session)
            for part, each in data.items()
        }

    def caches(
        self, record: Record, ids: Sequence[int], identity: ModelIdentity, spec: ModelSpec
    ) -> list[SequenceCache]:
        """Caches of a record.

        Args:
            ids: its tokens, as its log has them.

        Raises:
            Damaged: a blob is missing, or not what was written.
            Refused: it is whole, but another's.
            BudgetError: it does not fit in host memory.
            StoreError: the disk fails.
        """
        stored = sum(ref.bytes for ref in record.spans)
        begun = time.perf_counter()
        with self._ledger.reserve(Tier.HOST, record.tenant, stored + 2 * record.cache_bytes):
            found: list[SequenceCache] = []
            for each in record.each:
                chunks, rest = self._read_parts(each, ids, identity)
                state = join_chunks(chunks, rest, spec, len(ids)) if chunks else rest
                found.append(restore_cache(spec, state, each.cache))
        longest = max(cache.next_position for cache in found)
        if longest > len(ids) or (len(found) == 1 and longest < len(ids)):
            raise Damaged(f"The saved cache has read {longest} tokens, its log has {len(ids)}.")
        self._rates.loaded(Tier.DISK, stored, time.perf_counter() - begun)
        return found

    def prefix(
        self,
        tenant: str,
        shared: Sequence[ChunkMatch],
        ids: Sequence[int],
        identity: ModelIdentity,
        spec: ModelSpec,
        unusable: Callable[[ChunkMatch, LarderError], None],
    ) -> SequenceCache | None:
        """Cache of the longest prefix whose chunks are intact; None if there is none.

        Args:
            shared: chunks that hold the beginning, as `ChunkIndex.match_prefix` finds them.
            unusable: called with the first unusable chunk and its error.

        Raises:
            BudgetError: it does not fit in host memory.
        """
        stored = sum(each.chunk.ref.bytes for each in shared)
        begun = time.perf_counter()
        with self._ledger.reserve(Tier.HOST, tenant, 3 * stored):
            pieces: list[CacheTensors] = []
            behind = PrefixDigest(ids)
            for each in shared:
                try:
                    data = self._blobs.get(each.chunk.ref, tenant)
                    pieces.append(_chunk_tensors(data, tenant, identity, behind, each.tokens))
                except LarderError as error:
                    unusable(each, error)
                    break
            length = behind.start
            if not pieces:
                return None
            meta = CacheSpec(CacheForm.DENSE).meta() | {"next_position": str(length)}
            cache = restore_cache(spec, join_chunks(pieces, {}, spec, length), meta)
        self._rates.loaded(Tier.DISK, stored, time.perf_counter() - begun)
        return cache

    def _read_parts(
        self, record: Record, ids: Sequence[int], identity: ModelIdentity
    ) -> tuple[list[CacheTensors], CacheTensors]:
        """Chunk tensors in order, and the tensors of the session's own parts."""
        chunks: list[CacheTensors] = []
        rest: CacheTensors = {}
        behind = PrefixDigest(ids)
        for data in self._each(record):
            told = peek_metadata(data)
            if told.get("kind") == CHUNK_KIND:
                chunks.append(
                    _chunk_tensors(data, record.tenant, identity, behind, _chunk_len(told))
                )
            else:
                part = _snapshot_tensors(data, record, identity)
                if rest.keys() & part.keys():
                    raise Damaged("Two parts of the saved cache hold the same tensor.")
                rest |= part
        return chunks, rest

    def _each(self, record: Record) -> Iterator[bytes]:
        """Blobs in order; the next ones are read and verified ahead."""
        with ThreadPoolExecutor(READ_THREADS) as pool:
            later = iter(record.spans)
            coming = deque[Future[bytes]]()
            try:
                while True:
                    for ref in islice(later, MAX_PREFETCHED_BLOBS - len(coming)):
                        coming.append(pool.submit(self._blobs.get, ref, record.tenant))
                    if not coming:
                        return
                    yield coming.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)


def restore_cache(spec: ModelSpec, state: CacheTensors, meta: Mapping[str, str]) -> SequenceCache:
    """Cache from a decoded state.

    Raises:
        Damaged: the two do not make one.
    """
    check_fits(state, spec)
    try:
        return SequenceCache.adopt(spec, state, meta)
    except CacheError as error:
        raise Damaged(f"The saved cache does not fit the model: {error}") from error
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise Damaged(f"The saved cache cannot be restored ({error}).") from error


def _snapshot_tensors(data: bytes, record: Record, identity: ModelIdentity) -> CacheTensors:
    tensors, told = decode_cache_blob(
        data, SNAPSHOT_KIND, record.tenant, identity, record.cache_bytes
    )
    if told.get("policy") != {"name": record.policy}:
        raise Refused("A part of the saved cache was made by another policy.", "policy")
    return tensors


def _chunk_tensors(
    data: bytes, tenant: str, identity: ModelIdentity, behind: PrefixDigest, count: int
) -> CacheTensors:
    """Tensors of a chunk, verified to follow this prefix and to match the next tokens.

    Args:
        behind: where it should stand; goes on behind it.
        count: tokens that are wanted of it.
    """
    tensors, told = decode_cache_blob(data, CHUNK_KIND, tenant, identity, 2 * len(data))
    span, start = told.get("span"), behind.start
    wanted = list(behind.ids[start : start + count])
    tokens = span.get("tokens") if isinstance(span, dict) else None
    if not isinstance(span, dict) or not isinstance(tokens, list):
        raise Damaged("A chunk of the saved cache lacks its position.")
    is_behind = span.get("start") == start and tokens[: len(wanted)] == wanted
    if not is_behind or span.get("prefix") != behind.digest(tokens):
        raise Refused("A chunk of the saved cache belongs to another text.", "tokens")
    behind.advance(wanted)
    return {name: tensor[:, : len(wanted)] for name, tensor in tensors.items()}


def _chunk_len(told: Mapping[str, Any]) -> int:
    span = told.get("span")
    count = span.get("n_tokens") if isinstance(span, dict) else None
    if type(count) is not int or count < 1:
        raise Damaged("A chunk of the saved cache lacks its number of tokens.")
    return count
