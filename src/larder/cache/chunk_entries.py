"""Keys and values of consecutive tokens, by layer, outside of any cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError
from larder.core.spec import ModelSpec
from larder.core.types import Keys, Values
from larder.ops.rope import rerotate

TINY = 1e-30  # of a chunk without attention to itself


@dataclass(frozen=True)
class ChunkEntries:
    """Lossless entries of a chunk: consecutive tokens, all layers, all heads.

    Tensors are never written; several caches may copy from them.

    Args:
        keys: by layer, rotated to `start`, `start` + 1, ...
        values: by layer.
        start: true position of the first token where they were read.
    """

    keys: tuple[Keys, ...]
    values: tuple[Values, ...]
    start: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.keys[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(side.nbytes for side in (*self.keys, *self.values))

    @staticmethod
    def of(cache: SequenceCache, start: int, stop: int) -> ChunkEntries:
        """Copy of the entries of a dense cache at true positions [start, stop).

        Raises:
            CacheError: the cache does not hold all of them, or holds them in another form.
        """
        is_whole = cache.cache_spec.form == "dense" and not cache.spec.windows
        lengths = {length for heads in cache.lengths() for length in heads}
        if not is_whole or lengths != {cache.next_position}:
            raise CacheError(
                "A chunk needs a dense cache that holds every token it has read: prefill it under "
                "the policy `full`."
            )
        if not 0 <= start < stop <= cache.next_position:
            raise CacheError(
                f"A chunk at [{start}, {stop}) is not inside the {cache.next_position} tokens that "
                "its cache has read: give a chunk inside them."
            )
        keys, values = list[Keys](), list[Values]()
        for index, layer in enumerate(cache.spec.layers):
            held = cache.entries(index)
            rows = torch.tensor(held.starts, device=held.keys.device)[:, None]
            rows = rows + torch.arange(start, stop, device=held.keys.device)  # [K, N]
            keys.append(held.keys[rows].contiguous())
            values.append(held.values[rows].contiguous())
            assert layer.kv_heads == len(rows)
        return ChunkEntries(tuple(keys), tuple(values), start)

    def first(self, count: int) -> ChunkEntries:
        """First `count` tokens; views."""
        sides = ([side[:, :count] for side in both] for both in (self.keys, self.values))
        keys, values = map(tuple, sides)
        return ChunkEntries(keys, values, self.start)

    def slice(self, start: int, stop: int) -> ChunkEntries:
        """Copies of the tokens [start, stop), counted from the first."""
        keys = tuple(side[:, start:stop].clone() for side in self.keys)
        values = tuple(side[:, start:stop].clone() for side in self.values)
        return ChunkEntries(keys, values, self.start + start)

    def to(self, device: torch.device | str) -> ChunkEntries:
        """Entries on a device; the same tensors where they are on it."""
        sides = ([side.to(device) for side in both] for both in (self.keys, self.values))
        keys, values = map(tuple, sides)
        return ChunkEntries(keys, values, self.start)

    def moved_to(self, start: int, spec: ModelSpec) -> ChunkEntries:
        """Entries with keys rotated to `start`, `start` + 1, ...; values are shared.

        Every layer's rotation must be known.
        """
        if start == self.start:
            return self
        steps = torch.arange(self.num_tokens, device=self.keys[0].device)
        keys = [
            rerotate(
                side,
                self.start + steps,
                start + steps,
                torch.tensor(layer.radians or (), device=side.device),
            )
            for side, layer in zip(self.keys, spec.layers, strict=True)
        ]
        return ChunkEntries(tuple(keys), self.values, start)

    def append_to(self, cache: SequenceCache) -> None:
        """Append copies to every layer of a cache, which counts them as read.

        Raises:
            CacheError: they do not continue the cache; nothing is appended.
        """
        if cache.next_position != self.start:
            raise CacheError(
                f"Entries at positions {self.start} and later cannot follow the "
                f"{cache.next_position} tokens that the cache has read: move them first."
            )
        stop = self.start + self.num_tokens
        positions = torch.arange(self.start, stop, device=self.keys[0].device)
        for store, keys, values in zip(cache.layers, self.keys, self.values, strict=True):
            store.append(keys, values, positions)
        cache.advance(self.num_tokens)


@dataclass(frozen=True)
class ChunkProfile:
    """Attention of a chunk's tokens, in the text that it was read in, by layer (Cache-Craft).

    Args:
        before: token ids of the chunks before it, in order.
        inter: attention to each of them, summed over tokens and averaged over heads.
        intra: attention to the chunk itself.
        tokens: attention of each token to all chunks before it, summed over layers.
    """

    before: tuple[tuple[int, ...], ...]
    inter: tuple[tuple[float, ...], ...]
    intra: tuple[float, ...]
    tokens: tuple[float, ...]

    def impact(self) -> float:
        """Attention of the chunk to others: the sigmoid of outer over inner attention, each per
        pair of tokens.
        """
        count = max(len(self.tokens), 1)
        sizes = [max(count * len(ids), 1) for ids in self.before]
        outer = [sum(m / size for m, size in zip(row, sizes, strict=True)) for row in self.inter]
        inner = [mass / count**2 for mass in self.intra]
        return 1 / (1 + math.exp(-sum(outer) / max(sum(inner), TINY)))

    def overlap(self, now: Sequence[tuple[int, ...]]) -> float:
        """Share of its outer attention that chunks before it now had, less for other orders.

        1 where the chunks are the same in the same order, or it had none and has none.
        """
        if tuple(now) == self.before:
            return 1.0
        masses = [sum(row[index] for row in self.inter) for index in range(len(self.before))]
        if sum(masses) <= 0:
            return 0.0
        again = [index for index, ids in enumerate(self.before) if ids in now]
        indices = [list(now).index(self.before[index]) for index in again]
        pairs = [(one, other) for at, one in enumerate(indices) for other in indices[at + 1 :]]
        swapped = sum(one > other for one, other in pairs) / max(len(pairs), 1)
        return sum(masses[index] for index in again) / sum(masses) * (1 - swapped)

    def share(self, now: Sequence[tuple[int, ...]], alpha: float) -> float:
        """Share of the chunk's tokens to compute again behind the chunks `now`, in [0, 1]."""
        return min(max(alpha * self.impact() * (1 - self.overlap(now)), 0.0), 1.0)

    def most_outward(self, count: int) -> list[int]:
        """Indices of the tokens with most attention to the chunks before, ascending."""
        order = sorted(range(len(self.tokens)), key=lambda token: -self.tokens[token])
        return sorted(order[:count])


def concatenate(chunks: Sequence[ChunkEntries]) -> ChunkEntries:
    """Entries of consecutive chunks as one; each keeps its rotation."""
    keys = tuple(torch.cat(sides, 1) for sides in zip(*(c.keys for c in chunks), strict=True))
    values = tuple(torch.cat(sides, 1) for sides in zip(*(c.values for c in chunks), strict=True))
    return ChunkEntries(keys, values, chunks[0].start)
