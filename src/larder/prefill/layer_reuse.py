"""Chunks of one model that serve another one of the same shape (DroidSpeak).

Liu et al., "DroidSpeak: KV Cache Sharing for Cross-LLM Communication and Multi-LLM Serving" (2024),
arXiv:2411.02820. A chunk that the sender has read is taken with its keys and values; a range of
layers is computed again by the receiver, from the sender's hidden states before it
(`larder.models.layer_reuse`). The receiver reads the prefix of all chunks itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.sequence import SequenceCache
from larder.core.errors import ModelError
from larder.core.spec import ModelSpec
from larder.core.types import TokenIds
from larder.models.decoder import Decoder
from larder.models.layer_reuse import LayerRange, SharedReading, check_layers, receive_reading
from larder.prefill.contexts import ChunkSource, ChunkStates, append_text


@dataclass(frozen=True)
class SenderChunks:
    """Chunks of a model that other models take.

    Args:
        source: its chunks, with the hidden states before the layers `source.state_layers`.
        spec: of its caches.
    """

    source: ChunkSource
    spec: ModelSpec


class ReusedChunks(ChunkSource):
    """Chunks of a receiver: its own, and those of a sender where it has none.

    What is taken from the sender approximates the receiver's own reading, is computed at each use,
    and is kept nowhere.

    Args:
        own: chunks that the receiver has read.
        sender: chunks of a model of the same shape.
        receiver: the model that takes them.
        layers: range of layers that the receiver computes.

    Raises:
        ModelError: the receiver has no such layers, or the sender keeps no hidden states before
            the first of them.
    """

    is_exact: ClassVar[bool] = False

    def __init__(
        self, own: ChunkSource, sender: SenderChunks, receiver: Decoder, layers: LayerRange
    ) -> None:
        check_range(receiver, layers, sender.source.state_layers)
        self._own, self._sender, self._receiver = own, sender, receiver
        self.layers = layers

    def find(self, spec: ModelSpec, prefix: TokenIds, ids: TokenIds) -> ChunkEntries | None:
        found = self._own.find(spec, prefix, ids)
        if found is not None or not prefix + ids:
            return found
        reading = self._reading(prefix, ids)
        if reading is None:
            return None
        before = self._prefix_entries(prefix) if prefix else None
        return receive_reading(self._receiver, reading, self.layers, before)

    def add(self, prefix: TokenIds, ids: TokenIds, cache: SequenceCache) -> None:
        self._own.add(prefix, ids, cache)

    def _reading(self, prefix: TokenIds, ids: TokenIds) -> SharedReading | None:
        """Entries and hidden states of the sender; None unless it has both."""
        source, spec, (start, stop) = self._sender.source, self._sender.spec, self.layers
        states: ChunkStates | None = ChunkStates({})
        if 0 < start < stop:
            states = source.states(spec, prefix, ids)
        if states is None or (0 < start < stop and start not in states.by_layer):
            return None
        entries = source.find(spec, prefix, ids)
        if entries is None:
            return None
        device = self._receiver.spec.device
        return SharedReading(ids, entries.to(device), dict(states.to(device).by_layer))

    def _prefix_entries(self, prefix: TokenIds) -> ChunkEntries:
        """The receiver's own entries of a prefix."""
        spec = self._receiver.spec
        found = self._own.find(spec, (), prefix)
        if found is not None:
            return found
        cache = SequenceCache(spec, "dense")
        append_text(self._receiver, cache, prefix)
        self._own.add((), prefix, cache)
        return ChunkEntries.of(cache, 0, len(prefix))


def check_range(receiver: Decoder, layers: LayerRange, kept: tuple[int, ...]) -> None:
    """Check a range of layers that a receiver computes.

    Args:
        kept: layers before which the sender keeps hidden states.

    Raises:
        ModelError: the receiver has no such layers, or there are no states to begin with.
    """
    start, stop = layers
    check_layers(receiver, (start, max(start, stop - 1)))
    if 0 < start < stop and start not in kept:
        known = ", ".join(map(str, kept)) or "no layer"
        raise ModelError(
            f"A range that starts at layer {start} needs the sender's hidden states before it, but "
            f"it keeps those before {known}: have it read again with these states kept, or start "
            "the range at one of these or at 0."
        )
