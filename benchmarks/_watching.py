"""Clocks on what a policy does in a pass, and what shares follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from larder.core.spec import LayerSpec, ModelSpec
from larder.core.types import Mode
from larder.models.decoder import Decoder
from larder.models.passes import Observer, Recorded, Row

Clock = Callable[[], float]


@dataclass
class Watch:
    """An observer whose time is added up.

    Args:
        stopped: when it was last done.
    """

    clock: Clock
    inner: Observer
    seconds: float = 0.0
    stopped: float = 0.0

    def __call__(self, row: int, layer: int, recorded: Recorded) -> None:
        started = self.clock()
        self.inner(row, layer, recorded)
        self.stopped = self.clock()
        self.seconds += self.stopped - started


@dataclass
class Clocked:
    """A decoder for reading that adds up what observers and scratch passes take."""

    decoder: Decoder
    clock: Clock
    judging: float = 0.0
    scratch: float = 0.0
    passes: list[str] = field(default_factory=list)

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    def read(self, rows: Sequence[Row], mode: Mode, observer: Observer) -> None:
        watch, started = Watch(self.clock, observer), self.clock()
        self.decoder.read(rows, mode, watch)
        self._count(mode, watch, started)

    def weigh(self, rows: Sequence[Row], mode: Mode, observer: Observer) -> list[torch.Tensor]:
        """What follows the last look is for the policy, too, but for the rest of one layer."""
        watch, started = Watch(self.clock, observer), self.clock()
        surprises = self.decoder.weigh(rows, mode, watch)
        watch.seconds += self.clock() - watch.stopped
        self._count(mode, watch, started)
        return surprises

    def predict(
        self, rows: Sequence[Row], mode: Mode, wanted: Sequence[int], observer: Observer | None
    ) -> torch.Tensor:
        watch, started = Watch(self.clock, observer or _blind), self.clock()
        logits = self.decoder.predict(rows, mode, wanted, watch)
        self._count(mode, watch, started)
        return logits

    def _count(self, mode: Mode, watch: Watch, started: float) -> None:
        self.judging += watch.seconds
        if mode is not Mode.APPEND:
            self.scratch += self.clock() - started - watch.seconds
        self.passes.append(mode.value)


@dataclass
class Stuffing(Clocked):
    """Reads no text: entries of random numbers come in, under the eyes of the policy.

    It costs a hundredth of reading, and keys, values and queries that lie in no direction are what
    the other caches of this benchmark hold.
    """

    def read(self, rows: Sequence[Row], mode: Mode, observer: Observer) -> None:
        for layer in self.spec.layers:
            for number, row in enumerate(rows):
                recorded = _at_random(layer, row)
                if mode is Mode.APPEND:
                    told = recorded.keys, recorded.values, recorded.positions
                    row.cache._stores[layer.index].append(*told)
                observer(number, layer.index, recorded)
        if mode is Mode.APPEND:
            for row in rows:
                row.cache.advance(len(row.ids))
        self.passes.append(mode.value)


def shares_of(judging: float, watched: float, alone: float) -> dict[str, float]:
    """Seconds of a step, and which share of it judging has.

    Args:
        watched, alone: the whole step with the policy watching, and without.
    """
    shares = {"share": judging / watched, "difference_share": 1 - alone / watched}
    return shares | {"judging_s": judging, "watched_s": watched, "alone_s": alone}


def over_window(
    due: Mapping[str, float], quiet: Mapping[str, float], excess: int
) -> dict[str, float]:
    """The mean step of a window: one in which entries go, and `excess` in which none do."""
    names = ("judging_s", "watched_s", "alone_s")
    return shares_of(*((due[name] + excess * quiet[name]) / (excess + 1) for name in names))


def _at_random(layer: LayerSpec, row: Row) -> Recorded:
    """What a layer might have made of a row."""
    count, size = len(row.ids), layer.head_dim
    queries = torch.randn(layer.query_heads, count, size)
    keys, values = torch.randn(2, layer.kv_heads, count, size)
    return Recorded(queries, keys, values, torch.tensor(row.positions()))


def _blind(*seen: object) -> None:
    """Watches nothing."""
