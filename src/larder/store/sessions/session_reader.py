"""Sessions read back from blobs: token logs, transcripts and caches, each verified."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from larder.cache.sequence import SequenceCache
from larder.cache.spec import CacheSpec
from larder.core.errors import (
    CacheError,
    Damaged,
    LarderError,
    MissingWeights,
    Refused,
    UnknownName,
)
from larder.core.spec import ModelSpec
from larder.store.blobs.blob_store import BlobRef
from larder.store.blobs.cache_state import check_fits, join_chunks
from larder.store.blobs.container import peek_metadata
from larder.store.blobs.payloads import (
    CHUNK_KIND,
    SNAPSHOT_KIND,
    add_owner,
    decode_cache_blob,
    decode_token_log,
    strip_owner,
)
from larder.store.blobs.tenant_blobs import TenantBlobs
from larder.store.codecs.base import codec_named
from larder.store.ledger import Tier
from larder.store.model_identity import ModelIdentity
from larder.store.prefix.chunk_records import ChunkMatch, PrefixDigest, prefix_digest
from larder.store.sessions.chunk_stream import (
    CacheTensors,
    ChunkStream,
    bytes_at_once,
    loaded_chunks,
)
from larder.store.sessions.records import Record
from larder.store.stream_controller import StreamController
from larder.store.throughput import ThroughputEstimates

READ_THREADS = 4  # blobs that are read and verified at once
MAX_PREFETCHED_BLOBS = 8  # blobs in memory, the one that is used included


@dataclass(frozen=True)
class CacheRequirements:
    """Requirements of a reader: caches of other models or policies are not used.

    Args:
        policy: canonical spelling, sizes filled in.
        streaming: levels of caches that are stored in chunks.
    """

    identity: ModelIdentity
    policy: str
    spec: ModelSpec
    streaming: StreamController = StreamController()

    def decides_by_chunk(self, record: Record) -> bool:
        """True if what is loaded, and what is read again, is chosen chunk by chunk."""
        return bool(codec_named(record.codec).levels) and self.streaming.seconds < math.inf

    def check(self, record: Record, session_ids: Sequence[int], ids: Sequence[int] | None) -> None:
        """Check that the caches of a record were made under these requirements.

        Args:
            session_ids: tokens of the session.
            ids: the text to continue, if known.

        Raises:
            Refused: they were not, or are of another text.
        """
        differing = self.identity.differences(ModelIdentity.from_dict(record.identity))
        if differing:
            raise Refused(f"The cache differs in {', '.join(differing)}.", "identity")
        if record.policy != self.policy:
            raise Refused(f"The cache was made by {record.policy}.", "policy")
        read = tuple(session_ids[: record.num_cached_tokens])
        if ids is not None and tuple(ids[: len(read)]) != read:
            raise Refused("The text does not begin as the session does.", "tokens")


@dataclass(frozen=True)
class LoadedSession:
    """Session as loaded.

    Args:
        record: its newest record.
        ids: all of its tokens; the caches may have read fewer, as the record says.
        transcript: the conversation, if saved.
        cache: None if the text must be prefilled again.
        reason: one word for a missing cache, or for chunks of it that could not be loaded; else
            empty.
        others: caches after the first, if the session has several.
        levels: of the chunks that were streamed; the cache has read the tokens of these alone.
    """

    record: Record
    ids: tuple[int, ...]
    transcript: bytes | None
    cache: SequenceCache | None
    reason: str = ""
    others: tuple[SequenceCache, ...] = ()
    levels: tuple[int, ...] = ()


class SessionReader:
    """Reader of token logs, transcripts and caches from blobs. Safe from threads."""

    def __init__(self, blobs: TenantBlobs, rates: ThroughputEstimates) -> None:
        self._blobs, self._ledger, self._rates = blobs, blobs.ledger, rates

    def ids(self, record: Record) -> tuple[int, ...]:
        """Token ids of a session.

        Raises:
            Damaged, Refused: the log is damaged, or another session's.
        """
        data = self._blobs.get(record.tokens, record.tenant)
        return decode_token_log(data, record.num_tokens, record.tenant, record.session)

    def transcript(self, record: Record) -> bytes:
        """Transcript of a session.

        Raises:
            Damaged, Refused: it is damaged, or another session's.
        """
        if record.transcript is None:
            raise Damaged("The session was saved without a transcript.")
        data = self._blobs.get(record.transcript, record.tenant)
        return strip_owner(data, record.tenant, record.session)

    def extra_state(self, record: Record) -> bytes | None:
        """Extra state saved with a session's caches; None if there is none.

        Raises:
            Damaged, Refused: it is damaged, or another session's.
        """
        if record.beside is None:
            return None
        return strip_owner(self._blobs.get(record.beside, record.tenant), record.tenant)

    def for_session(self, record: Record, session: str) -> dict[str, bytes]:
        """Token log and transcript re-encoded for another session of the tenant, by part.

        Raises:
            Damaged, Refused: it is damaged, or another session's.
        """
        tenant, parts = record.tenant, {"tokens": record.tokens}
        if record.transcript is not None:
            parts["transcript"] = record.transcript
        data = {part: self._blobs.get(ref, tenant) for part, ref in parts.items()}
        return {
            part: add_owner(strip_owner(each, tenant, record.session), tenant, session)
            for part, each in data.items()
        }

    def cache_covers(self, record: Record, ids: Sequence[int]) -> bool:
        """True if the caches of a record have read the beginning of a text.

        Raises:
            Damaged, Refused: as `ids`.
        """
        count = record.num_cached_tokens
        if record.removed or not 0 < count <= len(ids):
            return False
        if record.cache_prefix:
            return record.cache_prefix == prefix_digest(ids[:count])
        return self.ids(record)[:count] == tuple(ids[:count])

    def caches(
        self, record: Record, ids: Sequence[int], requirements: CacheRequirements
    ) -> tuple[list[SequenceCache], tuple[int, ...], LarderError | None]:
        """Caches of a record, the levels of the chunks that were streamed, and the error of the
        chunk behind them, if it has one.

        A streamed cache has read the tokens of its chunks alone.

        Args:
            ids: tokens that the caches have read.

        Raises:
            Damaged: a blob is missing or damaged.
            Refused: it is intact, but another model's, policy's or tenant's; or the model reads the
                whole text within the deadline.
            BudgetError: it does not fit in host memory.
            StoreError: the disk fails.
        """
        if codec_named(record.codec).levels:
            cache, levels, error = self._stream(record, ids, requirements)
            return [cache], levels, error
        return self._whole(record, ids, requirements.identity, requirements.spec), (), None

    def _whole(
        self, record: Record, ids: Sequence[int], identity: ModelIdentity, spec: ModelSpec
    ) -> list[SequenceCache]:
        stored = bytes_at_once(record)
        started = time.perf_counter()
        with self._ledger.reserve(Tier.HOST, record.tenant, stored + 2 * record.cache_bytes):
            found: list[SequenceCache] = []
            for each in record.split_caches:
                chunks, rest = self._read_parts(each, ids, identity)
                state = join_chunks(chunks, rest, spec, len(ids)) if chunks else rest
                found.append(restore_cache(spec, state, each.cache))
        longest = max(cache.next_position for cache in found)
        if longest > len(ids) or (len(found) == 1 and longest < len(ids)):
            raise Damaged(f"The saved cache has read {longest} tokens, its log has {len(ids)}.")
        self._rates.loaded(Tier.DISK, stored, time.perf_counter() - started)
        return found

    def _stream(
        self, record: Record, ids: Sequence[int], requirements: CacheRequirements
    ) -> tuple[SequenceCache, tuple[int, ...], LarderError | None]:
        """Cache of the first chunks of a record, their levels, and the error of the next chunk."""
        chunks = loaded_chunks(record)

        def load(ref: BlobRef) -> tuple[CacheTensors, Mapping[str, object]]:
            data = self._blobs.get(ref, record.tenant)
            tensors = _snapshot_tensors(data, record, requirements.identity)
            return tensors, peek_metadata(data).get("span", {})

        rates = self._rates
        second = rates.load_seconds(Tier.DISK, 1)
        stream = ChunkStream(
            chunks,
            ids,
            requirements.streaming,
            load,
            rates.prefill_seconds,
            None if second is None else 1 / second,
        )
        started, largest = time.perf_counter(), bytes_at_once(record)
        with self._ledger.reserve(Tier.HOST, record.tenant, largest + 2 * record.cache_bytes):
            cache, levels, error = stream.restore(requirements.spec)
        if not levels:
            raise Refused("Prefill is in time and exact.", "slower")
        loaded = sum(chunk.sizes[each] for chunk, each in zip(chunks, levels, strict=False))
        rates.loaded(Tier.DISK, loaded, time.perf_counter() - started)
        return cache, tuple(levels), error

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
        started = time.perf_counter()
        with self._ledger.reserve(Tier.HOST, tenant, 3 * stored):
            chunks: list[CacheTensors] = []
            behind = PrefixDigest(ids)
            for each in shared:
                try:
                    data = self._blobs.get(each.chunk.ref, tenant)
                    chunks.append(_chunk_tensors(data, tenant, identity, behind, each.tokens))
                except LarderError as error:
                    unusable(each, error)
                    break
            length = behind.start
            if not chunks:
                return None
            meta = CacheSpec("dense").meta() | {"next_position": str(length)}
            cache = restore_cache(spec, join_chunks(chunks, {}, spec, length), meta)
        self._rates.loaded(Tier.DISK, stored, time.perf_counter() - started)
        return cache

    def _read_parts(
        self, record: Record, ids: Sequence[int], identity: ModelIdentity
    ) -> tuple[list[CacheTensors], CacheTensors]:
        """Chunk tensors in order, and the tensors of the session's own parts."""
        chunks: list[CacheTensors] = []
        rest: CacheTensors = {}
        behind = PrefixDigest(ids)
        for data in self._each(record):
            metadata = peek_metadata(data)
            if metadata.get("kind") == CHUNK_KIND:
                chunks.append(
                    _chunk_tensors(data, record.tenant, identity, behind, _chunk_len(metadata))
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
        Damaged: they do not match each other, or the model.
    """
    check_fits(state, spec)
    try:
        return SequenceCache.adopt(spec, state, meta)
    # UnknownName: a form of another version or plug-in.
    except (CacheError, MissingWeights, UnknownName) as error:
        raise Damaged(f"The saved cache does not fit the model: {error}") from error
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise Damaged(f"The saved cache cannot be restored ({error}).") from error


def _snapshot_tensors(data: bytes, record: Record, identity: ModelIdentity) -> CacheTensors:
    tensors, metadata = decode_cache_blob(
        data, SNAPSHOT_KIND, record.tenant, identity, record.cache_bytes
    )
    if metadata.get("policy") != {"name": record.policy}:
        raise Refused("A part of the saved cache was made by another policy.", "policy")
    return tensors


def _chunk_tensors(
    data: bytes, tenant: str, identity: ModelIdentity, behind: PrefixDigest, count: int
) -> CacheTensors:
    """Tensors of a chunk, verified to follow this prefix and to match the next tokens.

    Args:
        behind: prefix that it should follow; advanced past the chunk.
        count: number of its tokens to return.
    """
    tensors, metadata = decode_cache_blob(data, CHUNK_KIND, tenant, identity, 2 * len(data))
    span, start = metadata.get("span"), behind.start
    wanted = list(behind.ids[start : start + count])
    tokens = span.get("tokens") if isinstance(span, dict) else None
    if not isinstance(span, dict) or not isinstance(tokens, list):
        raise Damaged("A chunk of the saved cache lacks its position.")
    is_behind = span.get("start") == start and tokens[: len(wanted)] == wanted
    if not is_behind or span.get("prefix") != behind.digest(tokens):
        raise Refused("A chunk of the saved cache belongs to another text.", "tokens")
    behind.advance(wanted)
    return {name: tensor[:, : len(wanted)] for name, tensor in tensors.items()}


def _chunk_len(metadata: Mapping[str, Any]) -> int:
    span = metadata.get("span")
    count = span.get("n_tokens") if isinstance(span, dict) else None
    if type(count) is not int or count < 1:
        raise Damaged("A chunk of the saved cache lacks its number of tokens.")
    return count
