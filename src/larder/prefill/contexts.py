"""Contexts of a question as chunks: their tokens, their entries, and where these are kept.

A chunk is read behind the text that all contexts share (the prefix: the beginning of the chat
template, a system prompt), at the positions behind it. So its entries depend on prefix and chunk
alone, and the same chunk has the same entries in every request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.chunk_entries import ChunkEntries, ChunkProfile
from larder.cache.sequence import SequenceCache
from larder.core.arguments import check_count
from larder.core.errors import ModelError
from larder.core.spec import ModelSpec
from larder.core.types import AppendKind, Mode, TokenIds
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder

BLOCK_TOKENS = 1024  # bounds activations; blocks of any size give the same entries
DEFAULT_SOURCE_BYTES = 2**30
# What a chunk is held as, its prefix, its tokens or its place, and the chunks it was read behind.
ChunkKey = tuple[object, ...]
APART, VARIANT, ANCHOR, STATES = "apart", "variant", "anchor", "states"


class ChunkSource(ABC):
    """Entries of chunks by their tokens and those of their prefix, of one model and one tenant."""

    # Whether what is found is what the model itself would read.
    is_exact: ClassVar[bool] = True

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers before which the hidden states of a chunk are kept beside its entries, for other
        models of the same shape (DroidSpeak); none by default.
        """
        return ()

    @abstractmethod
    def find(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkEntries | None:
        """Entries of a chunk that was read behind a prefix; None if there are none.

        They start at the position behind the prefix, are lossless, and have the dtype and device
        of `spec`.
        """

    @abstractmethod
    def add(self, prefix: TokenIds, ids: TokenIds, cache: SequenceCache) -> None:
        """Keep the entries of a chunk; a source that has no room for them leaves them out.

        Args:
            cache: dense cache that has read prefix and chunk; it is read, not changed.
        """

    def variants(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> list[ChunkVariant]:
        """Entries of a chunk as they were in texts, behind other chunks, on the device where they
        are held; none by default.
        """
        return []

    def add_variant(self, prefix: TokenIds, ids: TokenIds, variant: ChunkVariant) -> None:
        """Keep a chunk as it was in a text; by default it is left out."""
        del prefix, ids, variant

    def anchors(self, spec: ModelSpec, prefix: TokenIds, index: int) -> list[ChunkAnchor]:
        """Chunks whose change at an index among contexts is known, on the device where they are
        held; none by default.
        """
        return []

    def add_anchor(self, prefix: TokenIds, index: int, anchor: ChunkAnchor) -> None:
        """Keep the change of a chunk at an index among contexts; by default it is left out.

        Its base is held as the chunk, and not held again.
        """
        del prefix, index, anchor

    def states(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkStates | None:
        """Hidden states of a chunk, on the device of `spec`; None if there are none."""
        return None

    def add_states(self, prefix: TokenIds, ids: TokenIds, states: ChunkStates) -> None:
        """Keep the hidden states of a chunk; by default they are left out."""
        del prefix, ids, states


@dataclass(frozen=True)
class ChunkStates:
    """Hidden states of a chunk's tokens before some layers.

    Args:
        by_layer: states by the index of the layer.
    """

    by_layer: Mapping[int, Float[Tensor, "1 N hidden"]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(own.nbytes for own in self.by_layer.values())

    def to(self, device: torch.device | str) -> ChunkStates:
        """States on a device; the same tensors where they are on it."""
        return ChunkStates({layer: own.to(device) for layer, own in self.by_layer.items()})


@dataclass(frozen=True)
class ChunkVariant:
    """Chunk as it was in a text.

    Args:
        entries: computed behind the chunks that `profile` names.
        profile: what its tokens attended to there.
    """

    entries: ChunkEntries
    profile: ChunkProfile

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.entries.nbytes

    def to(self, device: torch.device | str) -> ChunkVariant:
        """Variant on a device; the same tensors where they are on it."""
        return replace(self, entries=self.entries.to(device))


@dataclass(frozen=True)
class ChunkAnchor:
    """Chunk read behind its prefix, and how its entries changed behind other contexts.

    Args:
        ids: its tokens.
        base: entries behind the prefix.
        change: what was added to them in a text, keys rotated as those of `base`.
    """

    ids: tuple[int, ...]
    base: ChunkEntries
    change: ChunkEntries


@dataclass(frozen=True)
class ChunkChange:
    """Anchor without its base, which is held as a chunk.

    Args:
        ids: its tokens.
        entries: as `ChunkAnchor.change`.
    """

    ids: tuple[int, ...]
    entries: ChunkEntries

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.entries.nbytes

    def to(self, device: torch.device | str) -> ChunkChange:
        """Change on a device; the same tensors where they are on it."""
        return replace(self, entries=self.entries.to(device))


StoredChunk = ChunkEntries | ChunkVariant | ChunkChange | ChunkStates


def variant_key(
    prefix: TokenIds, ids: TokenIds, before: tuple[tuple[int, ...], ...] = ()
) -> ChunkKey:
    """Key of a variant behind some chunks; without them, the beginning of the keys of all."""
    return (VARIANT, prefix, ids, *before)


def anchor_key(prefix: TokenIds, index: int, ids: tuple[TokenIds, ...] = ()) -> ChunkKey:
    """Key of an anchor at an index; without its tokens, the beginning of the keys of all."""
    return (ANCHOR, prefix, index, *ids)


def anchors_of(
    changes: Iterable[ChunkChange], bases: Iterable[ChunkEntries | None]
) -> list[ChunkAnchor]:
    """Anchors of changes whose base is held."""
    pairs = zip(changes, bases, strict=True)
    return [
        ChunkAnchor(chunk.ids, base, chunk.entries) for chunk, base in pairs if base is not None
    ]


class NoChunks(ChunkSource):
    """Source that keeps nothing."""

    def find(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkEntries | None:
        return None

    def add(self, prefix: TokenIds, ids: TokenIds, cache: SequenceCache) -> None:
        del prefix, ids, cache


class ChunkMemory(ChunkSource):
    """Chunks in memory; the least recently used ones leave. Not thread-safe.

    Use one for one model and one user: whoever reads through it can tell from the time of a
    prefill which texts others have read.

    Args:
        max_bytes: most bytes of all entries.
        state_layers: layers before which hidden states are kept, too, for another model of the
            same shape (`larder.engine.reused_chunks`).

    Examples:
        >>> chunks = ChunkMemory(2**28)
        >>> chunks.nbytes
        0
    """

    def __init__(
        self, max_bytes: int = DEFAULT_SOURCE_BYTES, state_layers: Sequence[int] = ()
    ) -> None:
        check_count("max_bytes", max_bytes)
        self._max_bytes, self._state_layers = max_bytes, tuple(state_layers)
        self._held = OrderedDict[ChunkKey, StoredChunk]()
        self._spec: ModelSpec | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(chunk.nbytes for chunk in self._held.values())

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self._state_layers

    def states(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkStates | None:
        found = self._all(spec, (STATES, prefix, ids))
        own = found[0] if found else None
        return own if isinstance(own, ChunkStates) else None

    def add_states(self, prefix: TokenIds, ids: TokenIds, states: ChunkStates) -> None:
        self._hold((STATES, prefix, ids), states)

    def find(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkEntries | None:
        """Entries of a chunk, which becomes the most recently used one.

        Raises:
            ModelError: the chunks are of another model.
        """
        found = self._all(spec, (APART, prefix, ids))
        entries = found[0] if found else None
        return entries if isinstance(entries, ChunkEntries) else None

    def add(self, prefix: TokenIds, ids: TokenIds, cache: SequenceCache) -> None:
        """Keep the entries of a chunk, unless they alone exceed the limit."""
        self._hold((APART, prefix, ids), ChunkEntries.of(cache, len(prefix), cache.next_position))

    def variants(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> list[ChunkVariant]:
        found = self._all(spec, variant_key(prefix, ids))
        return [each for each in found if isinstance(each, ChunkVariant)]

    def add_variant(self, prefix: TokenIds, ids: TokenIds, variant: ChunkVariant) -> None:
        self._hold(variant_key(prefix, ids, variant.profile.before), variant)

    def anchors(self, spec: ModelSpec, prefix: TokenIds, index: int) -> list[ChunkAnchor]:
        found = self._all(spec, anchor_key(prefix, index))
        changes = [each for each in found if isinstance(each, ChunkChange)]
        bases = [self.find(spec, prefix, change.ids) for change in changes]
        return anchors_of(changes, bases)

    def add_anchor(self, prefix: TokenIds, index: int, anchor: ChunkAnchor) -> None:
        change = ChunkChange(anchor.ids, anchor.change)
        self._hold(anchor_key(prefix, index, (anchor.ids,)), change)
        self._hold((APART, prefix, anchor.ids), anchor.base)  # used later, so that it leaves later

    def _all(self, spec: ModelSpec, key: ChunkKey) -> list[StoredChunk]:
        """Chunks that are held under keys that begin so, most recently used from now on."""
        if self._spec is not None and self._spec is not spec:
            raise ModelError(
                "A ChunkMemory holds chunks of one loaded model, but another one reads through it: "
                "make one for each model."
            )
        self._spec = spec
        keys = [held for held in self._held if held[: len(key)] == key]
        for held in keys:
            self._held.move_to_end(held)
        return [self._held[held] for held in keys]

    def _hold(self, key: ChunkKey, chunk: StoredChunk) -> None:
        if chunk.nbytes > self._max_bytes:
            return
        self._held[key] = chunk
        self._held.move_to_end(key)
        while self.nbytes > self._max_bytes:
            self._held.popitem(last=False)


class ChunkReader:
    """Entries of chunks behind one prefix, found in a source or read and added to it."""

    def __init__(self, decoder: Decoder, prefix: TokenIds, source: ChunkSource) -> None:
        self._decoder, self._prefix, self._source = decoder, prefix, source
        self._cache = SequenceCache(decoder.spec, "dense")

    def prefix(self) -> ChunkEntries | None:
        """Entries of the prefix; None if it is empty."""
        if not self._prefix:
            return None
        self._fill()
        return ChunkEntries.of(self._cache, 0, len(self._prefix))

    def chunk(self, ids: TokenIds) -> tuple[ChunkEntries, bool]:
        """Entries of a chunk, and whether they were found."""
        found = self._source.find(self._decoder.spec, self._prefix, ids)
        if found is not None and self._has_states(ids):
            return found, True
        self._fill()
        start = self._cache.next_position
        states = self._read_with_states(ids)
        entries = ChunkEntries.of(self._cache, start, start + len(ids))
        self._source.add(self._prefix, ids, self._cache)
        if states is not None:
            self._source.add_states(self._prefix, ids, states)
        self._cache.truncate(start)
        return entries, False

    def _has_states(self, ids: TokenIds) -> bool:
        """True if all hidden states that the source keeps of a chunk are there."""
        wanted = set(self._source.state_layers)
        if not wanted:
            return True
        states = self._source.states(self._decoder.spec, self._prefix, ids)
        return states is not None and wanted <= states.by_layer.keys()

    def _read_with_states(self, ids: TokenIds) -> ChunkStates | None:
        """Read a chunk; its hidden states where the source keeps them."""
        if not self._source.state_layers:
            self._read(ids)
            return None
        from larder.models.layer_reuse import recorded_states

        with recorded_states(self._decoder, self._source.state_layers) as recorder:
            self._read(ids)
        return ChunkStates(recorder.states())

    def _fill(self) -> None:
        """Read the prefix, unless it has been read."""
        if self._cache.next_position == len(self._prefix):
            return
        found = self._source.find(self._decoder.spec, (), self._prefix)
        if found is not None:
            found.append_to(self._cache)
            return
        self._read(self._prefix)
        self._source.add((), self._prefix, self._cache)

    def _read(self, ids: TokenIds) -> None:
        append_text(self._decoder, self._cache, ids)


def append_text(decoder: Decoder, cache: SequenceCache, ids: TokenIds) -> None:
    """Read tokens with a model behind a cache that keeps all of them."""
    for start in range(0, len(ids), BLOCK_TOKENS):
        block = ids[start : start + BLOCK_TOKENS]
        decoder.read([BatchSegment(cache, block, append_kind=AppendKind.TEXT)], Mode.APPEND)


def check_chunkable(spec: ModelSpec, purpose: str) -> None:
    """Check that all layers of a model hold entries of their own, at positions that can change.

    Raises:
        ModelError: they do not.
    """
    if spec.recurrent or len(spec.managed) < len(spec.layers):
        raise ModelError(
            f"{purpose} cannot be used for a model with sliding windows, recurrent layers or "
            "layers that share entries: take the policy full, which reads the contexts as one text."
        )


def nbytes_of(entries: Iterable[ChunkEntries]) -> int:
    """Bytes of several chunks."""
    return sum(each.nbytes for each in entries)
