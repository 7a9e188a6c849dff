"""A session's state on its way back: verified in every respect, or not given back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.cache.spec import CacheForm, CacheSpec
from larder.core.errors import CacheError, Damaged, LarderError, Refused
from larder.core.spec import ModelSpec
from larder.store.behind import PrefixDigest
from larder.store.blobs.container import peek_metadata
from larder.store.blobs.payloads import CHUNK_KIND, SNAPSHOT_KIND, decode_cache_blob
from larder.store.blobs.tenant_blobs import TenantBlobs
from larder.store.ledger import ByteLedger, Tier
from larder.store.model_identity import ModelIdentity
from larder.store.pieces import check_fits, join_chunks
from larder.store.prefix.chunk_records import ChunkMatch
from larder.store.sessions.records import Record
from larder.store.throughput import ThroughputEstimates

CacheTensors = dict[str, Tensor]
READ_THREADS = 4  # blobs that are read and verified at once
MAX_PREFETCHED_BLOBS = 8  # blobs in memory, the one that is used included


class CacheReader:
    """Reads caches from blobs. Safe from threads."""

    def __init__(self, vault: TenantBlobs, ledger: ByteLedger, rates: ThroughputEstimates) -> None:
        self._vault, self._ledger, self._rates = vault, ledger, rates

    def caches(
        self, record: Record, ids: Sequence[int], identity: ModelIdentity, spec: ModelSpec
    ) -> list[SequenceCache]:
        """The caches that a record tells of.

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
                chunks, rest = self._spans(each, ids, identity)
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
        """The cache of the longest beginning of a text whose chunks are whole; None of nothing.

        Args:
            shared: chunks that hold the beginning, as `Chunks.longest` finds them.
            unusable: told of the first chunk that cannot be used, and why.

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
                    data = self._vault.get(each.chunk.ref, tenant)
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

    def _spans(
        self, record: Record, ids: Sequence[int], identity: ModelIdentity
    ) -> tuple[list[CacheTensors], CacheTensors]:
        """Chunks in their order, and what is the session's alone."""
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
        """Blobs in their order; the next ones are read and verified meanwhile."""
        with ThreadPoolExecutor(READ_THREADS) as pool:
            later = iter(record.spans)
            coming = deque[Future[bytes]]()
            try:
                while True:
                    for ref in islice(later, MAX_PREFETCHED_BLOBS - len(coming)):
                        coming.append(pool.submit(self._vault.get, ref, record.tenant))
                    if not coming:
                        return
                    yield coming.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)


def restore_cache(spec: ModelSpec, state: CacheTensors, meta: Mapping[str, str]) -> SequenceCache:
    """A cache of a state that was read.

    Raises:
        Damaged: the two do not make one.
    """
    check_fits(state, spec)
    try:
        return SequenceCache.adopt(spec, state, meta)
    except CacheError as error:
        raise Damaged(f"The saved cache does not fit the model: {error}") from error
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise Damaged(f"The saved cache cannot be put together ({error}).") from error


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
    """A chunk's tensors, once it is known to stand behind these tokens and to begin with the rest.

    Args:
        behind: where it should stand; goes on behind it.
        count: tokens that are wanted of it.
    """
    tensors, told = decode_cache_blob(data, CHUNK_KIND, tenant, identity, 2 * len(data))
    span, start = told.get("span"), behind.start
    wanted = list(behind.ids[start : start + count])
    tokens = span.get("tokens") if isinstance(span, dict) else None
    if not isinstance(span, dict) or not isinstance(tokens, list):
        raise Damaged("A chunk of the saved cache does not tell where it belongs.")
    is_behind = span.get("start") == start and tokens[: len(wanted)] == wanted
    if not is_behind or span.get("prefix") != behind.digest(tokens):
        raise Refused("A chunk of the saved cache belongs to another text.", "tokens")
    behind.advance(wanted)
    return {name: tensor[:, : len(wanted)] for name, tensor in tensors.items()}


def _chunk_len(told: Mapping[str, Any]) -> int:
    span = told.get("span")
    count = span.get("n_tokens") if isinstance(span, dict) else None
    if type(count) is not int or count < 1:
        raise Damaged("A chunk of the saved cache does not tell how many tokens it has.")
    return count
