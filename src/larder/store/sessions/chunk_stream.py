"""Caches stored as chunks of tokens at several levels, and restored chunk by chunk (CacheGen).

    spans    chunk 0, finest | chunk 0, ... | chunk 0, coarsest | chunk 1, finest | ...

Every chunk is a part of a snapshot, verified as such, with its position in the text beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.errors import Damaged, LarderError
from larder.core.spec import ModelSpec
from larder.store.blobs.blob_store import BlobRef
from larder.store.blobs.cache_state import check_fits, is_lossless_cache
from larder.store.codecs.base import codec_named
from larder.store.prefix import chunk_index
from larder.store.prefix.chunk_records import prefix_digest
from larder.store.sessions.records import Record
from larder.store.stream_controller import StreamController, StreamProgress

CacheTensors = dict[str, Tensor]
SIDES = ("keys", "values")


def can_stream(cache: SequenceCache) -> bool:
    """True if a cache can be restored chunk by chunk: lossless, with values of its own."""
    return is_lossless_cache(cache) and not any(layer.latent_rank for layer in cache.spec.layers)


def chunk_slices(
    state: Mapping[str, Tensor], ids: Sequence[int]
) -> Iterator[tuple[CacheTensors, dict[str, object]]]:
    """Keys and values of each chunk of a lossless cache, with its position in the text."""
    size = chunk_index.CHUNK_TOKENS
    for start in range(0, len(ids), size):
        stop = min(start + size, len(ids))
        tensors = {
            name: tensor[:, start:stop].contiguous()
            for name, tensor in state.items()
            if name.partition(".")[2] in SIDES
        }
        yield (
            tensors,
            {"start": start, "n_tokens": stop - start, "prefix": prefix_digest(ids[:stop])},
        )


@dataclass(frozen=True)
class StreamedChunk:
    """Blobs of one chunk, finest first, and its tokens [start, stop)."""

    refs: tuple[BlobRef, ...]
    start: int
    stop: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Stored bytes at each level."""
        return tuple(ref.bytes for ref in self.refs)


def chunks_of(record: Record) -> list[StreamedChunk]:
    """Chunks of a record whose codec has levels.

    Raises:
        Damaged: it does not have the blobs of whole chunks.
    """
    levels, length = len(codec_named(record.codec).levels), record.num_cached_tokens
    count, rest = divmod(len(record.spans), levels)
    if rest or not count:
        raise Damaged(f"A cache in chunks of {levels} levels has {len(record.spans)} blobs.")
    spans = [record.spans[levels * each : levels * (each + 1)] for each in range(count)]
    size = chunk_index.CHUNK_TOKENS
    starts = range(0, length, size)
    if len(starts) != count:
        raise Damaged(f"A cache of {length} tokens has {count} chunks of {size}.")
    indices = zip(spans, starts, strict=True)
    return [StreamedChunk(refs, at, min(at + size, length)) for refs, at in indices]


def loaded_chunks(record: Record) -> list[StreamedChunk]:
    """Chunks of a record as they are loaded: all but full ones at the finest level, since they are
    encoded again once they have grown.

    Raises:
        Damaged: as `chunks_of`.
    """
    size, found = chunk_index.CHUNK_TOKENS, chunks_of(record)
    return [
        each
        if each.stop - each.start == size
        else replace(each, refs=(each.refs[0],) * len(each.refs))
        for each in found
    ]


def finest_bytes(record: Record) -> int:
    """Stored bytes of a record's caches, those of chunks at their finest level."""
    levels = max(1, len(codec_named(record.codec).levels))
    return sum(ref.bytes for ref in record.spans[::levels])


def bytes_at_once(record: Record) -> int:
    """Stored bytes in memory while a record's caches are loaded: of chunks one at one level."""
    sizes = [ref.bytes for ref in record.spans]
    return max(sizes) if codec_named(record.codec).levels else sum(sizes)


@dataclass(frozen=True)
class ChunkStream:
    """Restore of one cache, chunk by chunk.

    Args:
        chunks: all chunks of the cache.
        ids: tokens that it has read.
        controller: chooses levels.
        load: decoded tensors of a blob and its position in the text, verified.
        prefill_seconds: estimated seconds of reading a number of tokens; None if unknown.
        bandwidth: bytes per second that earlier loads had; None if unknown.
        clock: seconds.
    """

    chunks: Sequence[StreamedChunk]
    ids: Sequence[int]
    controller: StreamController
    load: Callable[[BlobRef], tuple[CacheTensors, Mapping[str, object]]]
    prefill_seconds: Callable[[int], float | None]
    bandwidth: float | None = None
    clock: Callable[[], float] = time.perf_counter

    def restore(self, spec: ModelSpec) -> tuple[SequenceCache, list[int], LarderError | None]:
        """Cache of the chunks that were loaded, their levels, and the error of a later chunk, if
        it ended the stream; the rest is to be read.

        Raises:
            Damaged: the first chunk is of another position, or of other shapes than the model's.
            LarderError: as `load` raises for the first chunk.
        """
        cache, levels = SequenceCache(spec, "dense"), list[int]()
        cache.allocate(len(self.ids))
        restore_start, bandwidth = self.clock(), self.bandwidth
        for index, chunk in enumerate(self.chunks):
            level = self.controller.level(
                self._progress(index, self.clock() - restore_start, bandwidth)
            )
            if level is None:
                break
            level = chunk.refs.index(chunk.refs[level])
            started = self.clock()
            try:
                tensors, span = self.load(chunk.refs[level])
                entries = self._entries(chunk, tensors, span, spec)
            except LarderError as error:
                if not levels:
                    raise
                return cache, levels, error
            entries.append_to(cache)
            levels.append(level)
            bandwidth = chunk.sizes[level] / max(self.clock() - started, 1e-9)
        return cache, levels, None

    def _progress(self, number: int, elapsed: float, bandwidth: float | None) -> StreamProgress:
        left = self.chunks[number:]
        recompute = self.prefill_seconds(left[-1].stop - left[0].start)
        sizes = [chunk.sizes for chunk in left]
        return StreamProgress(sizes, len(self.chunks), elapsed, bandwidth, recompute)

    def _entries(
        self,
        chunk: StreamedChunk,
        tensors: CacheTensors,
        span: Mapping[str, object],
        spec: ModelSpec,
    ) -> ChunkEntries:
        """Entries of a chunk, verified to have its position and the model's shapes."""
        wanted = {"start": chunk.start, "n_tokens": chunk.stop - chunk.start}
        if dict(span) != wanted | {"prefix": prefix_digest(self.ids[: chunk.stop])}:
            raise Damaged(f"A chunk of a saved cache is not of the tokens from {chunk.start} on.")
        check_fits(tensors, spec)
        for layer in spec.layers:
            shape = (layer.kv_heads, wanted["n_tokens"], layer.head_dim)
            sides = (tensors.get(f"{layer.index}.{side}") for side in SIDES)
            if any(side is None or tuple(side.shape) != shape for side in sides):
                raise Damaged(f"A chunk of a saved cache lacks entries of layer {layer.index}.")
        keys, values = (
            tuple(tensors[f"{layer.index}.{side}"] for layer in spec.layers) for side in SIDES
        )
        return ChunkEntries(keys, values, chunk.start)
