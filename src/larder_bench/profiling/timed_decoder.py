"""Decoders for measurements of prefill: one that is timed, and one that reads no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from larder.core import LayerSpec, Mode
from larder.models import (
    NO_INPUTS,
    BatchSegment,
    Decoder,
    Inputs,
    LayerActivations,
    Observer,
    TokenNumbers,
)
from larder.policy import TokenProvider
from larder_bench.profiling.synthetic_keys import KeyQueryStream

Clock = Callable[[], float]


@dataclass
class TimedObserver:
    """Observer that sums up its time.

    Args:
        stopped: time at which its last call ended.
    """

    clock: Clock
    inner: Observer
    seconds: float = 0.0
    stopped: float = 0.0

    def __call__(self, row: int, layer: int, recorded: LayerActivations) -> None:
        started = self.clock()
        self.inner(row, layer, recorded)
        self.stopped = self.clock()
        self.seconds += self.stopped - started


class TimedDecoder(Decoder):
    """Decoder that sums up the time of observers and scratch passes during prefill.

    `observer_seconds` are seconds in observers, `scratch` those of scratch passes, which score a
    cache, without observers.
    """

    def __init__(self, decoder: Decoder, clock: Clock) -> None:
        vars(self).update(vars(decoder))  # the decoder keeps its reference to the model
        self.clock = clock
        self.observer_seconds = self.scratch = 0.0

    def read(
        self,
        rows: Sequence[BatchSegment],
        mode: Mode,
        observer: Observer | None = None,
        inputs: Inputs = NO_INPUTS,
    ) -> None:
        watch, started = self._watch(observer), self.clock()
        super().read(rows, mode, watch, inputs)
        self._count(mode, watch, started)

    def forward_token_numbers(
        self,
        rows: Sequence[BatchSegment],
        mode: Mode,
        providers: Mapping[str, TokenProvider],
        observer: Observer | None = None,
        inputs: Inputs = NO_INPUTS,
    ) -> list[TokenNumbers]:
        """Token numbers of the providers; time after the last observation counts as the policy's,
        too, except for one layer.
        """
        watch, started = self._watch(observer), self.clock()
        numbers = super().forward_token_numbers(rows, mode, providers, watch, inputs)
        watch.seconds += self.clock() - watch.stopped
        self._count(mode, watch, started)
        return numbers

    def forward_logits(
        self,
        rows: Sequence[BatchSegment],
        mode: Mode,
        wanted: Sequence[int],
        observer: Observer | None = None,
    ) -> torch.Tensor:
        watch, started = self._watch(observer), self.clock()
        logits = super().forward_logits(rows, mode, wanted, watch)
        self._count(mode, watch, started)
        return logits

    def _watch(self, observer: Observer | None) -> TimedObserver:
        return TimedObserver(self.clock, _ignore if observer is None else observer)

    def _count(self, mode: Mode, watch: TimedObserver, started: float) -> None:
        self.observer_seconds += watch.seconds
        if mode is not Mode.APPEND:
            self.scratch += self.clock() - started - watch.seconds


class SyntheticDecoder(TimedDecoder):
    """Decoder that reads no text: synthetic keys are appended and observed by the policy.

    It costs a hundredth of a prefill. Searches in keys need keys distributed like real ones.

    Args:
        streams: input of each layer, at least as long as the text.
    """

    def __init__(self, decoder: Decoder, streams: Sequence[KeyQueryStream]) -> None:
        super().__init__(decoder, time.perf_counter)
        self.streams = streams

    def read(
        self,
        rows: Sequence[BatchSegment],
        mode: Mode,
        observer: Observer | None = None,
        inputs: Inputs = NO_INPUTS,
    ) -> None:
        for layer in self.spec.layers:
            for index, row in enumerate(rows):
                recorded = self._activations(layer, row, mode)
                if mode is Mode.APPEND:
                    row.cache.layers[layer.index].append(
                        recorded.keys, recorded.values, recorded.positions
                    )
                if observer is not None:
                    observer(index, layer.index, recorded)
        if mode is Mode.APPEND:
            for row in rows:
                row.cache.advance(len(row.ids))

    def _activations(self, layer: LayerSpec, row: BatchSegment, mode: Mode) -> LayerActivations:
        """Synthetic activations of a layer for one segment."""
        count, size = len(row.ids), layer.head_dim
        queries = torch.randn(layer.query_heads, count, size)
        keys, values = torch.randn(2, layer.kv_heads, count, size)
        if mode is Mode.APPEND:
            start = row.cache.next_position
            keys = self.streams[layer.index].keys[:, start : start + count]
        positions = torch.tensor(row.positions(), device=self.spec.device)
        like = self.spec.device, self.spec.dtype
        return LayerActivations(queries.to(*like), keys.to(*like), values.to(*like), positions)


def _ignore(*arguments: object) -> None:
    """Observer without effect."""
