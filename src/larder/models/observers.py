"""Observers of forward batches: what is called with the activations of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from larder.cache.page_evictions import PageEviction
    from larder.cache.step_layout import SequenceEviction
    from larder.cache.step_tables import StepTables
    from larder.core.plan import StepMerging


@dataclass(frozen=True)
class LayerActivations:
    """Activations of one layer for one segment.

    Args:
        queries [H, Q, D], keys and values [K, Q, D]: post-RoPE.
        positions: true positions [Q].
        inputs: what activation providers captured of the tokens, by name.
    """

    queries: Float[Tensor, "H Q D"]
    keys: Float[Tensor, "K Q D"]
    values: Float[Tensor, "K Q D"]
    positions: Int[Tensor, " Q"]
    inputs: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


# Called with (segment index, layer, activations) after each layer of each segment, once the cache
# of that layer is up to date.
Observer = Callable[[int, int, LayerActivations], None]


class StepObserver(ABC):
    """Observer that may act on all layers of a decode step at once."""

    @abstractmethod
    def __call__(self, segment: int, layer: int, activations: LayerActivations) -> None:
        """Report of a layer, as of any observer."""

    @abstractmethod
    def step_evictions(self, layouts: Sequence[StepTables]) -> dict[int, SequenceEviction]:
        """Evictions of kernels that are due behind a step of single tokens, by segment.

        Args:
            layouts: of the cache of each segment, with its token counted.
        """

    def kept_evictions(self, layouts: Sequence[StepTables]) -> dict[int, SequenceEviction] | None:
        """`step_evictions` that are known before the step; None where one may not be.

        Args:
            layouts: of the cache of each segment.
        """
        del layouts
        return None

    def page_evictions(
        self, segments: Sequence[int], like: StepMerging | None = None
    ) -> dict[int, PageEviction]:
        """Evictions that are due behind a step over pages, of segments whose layers are then not
        acted on when they are reported.

        Args:
            segments: those that kernels can evict from.
            like: merging of other sequences of the step, whose scalar and slack any has to share.
        """
        del segments, like
        return {}

    @abstractmethod
    def end_step(self, done: Mapping[int, Sequence[int]]) -> bool:
        """Act on a step of single tokens, of which no layer was reported.

        Args:
            done: layers that kernels have evicted from, by segment.

        Returns:
            False if all layers are to be reported nevertheless.
        """


class JoinedObserver(StepObserver):
    """Observer of a batch that reports each segment to an observer of its own, as segment 0.

    Args:
        observers: by segment; those without one are not reported.
    """

    def __init__(self, observers: Mapping[int, Observer]) -> None:
        self._observers = observers

    def __call__(self, segment: int, layer: int, activations: LayerActivations) -> None:
        if segment in self._observers:
            self._observers[segment](0, layer, activations)

    def step_evictions(self, layouts: Sequence[StepTables]) -> dict[int, SequenceEviction]:
        found: dict[int, SequenceEviction] = {}
        for segment, each in self._observers.items():
            if isinstance(each, StepObserver):
                own = each.step_evictions([layouts[segment]])
                found.update((segment, eviction) for eviction in own.values())
        return found

    def kept_evictions(self, layouts: Sequence[StepTables]) -> dict[int, SequenceEviction] | None:
        found: dict[int, SequenceEviction] = {}
        for segment, each in self._observers.items():
            if isinstance(each, StepObserver):
                own = each.kept_evictions([layouts[segment]])
                if own is None:
                    return None
                found.update((segment, eviction) for eviction in own.values())
        return found

    def page_evictions(
        self, segments: Sequence[int], like: StepMerging | None = None
    ) -> dict[int, PageEviction]:
        found: dict[int, PageEviction] = {}
        for segment, each in self._observers.items():
            if isinstance(each, StepObserver) and segment in segments:
                own = each.page_evictions([0], like)
                found.update((segment, eviction) for eviction in own.values())
                like = like or next((each.merging for each in own.values()), None)
        return found

    def end_step(self, done: Mapping[int, Sequence[int]]) -> bool:
        own = [
            isinstance(each, StepObserver)
            and each.end_step({0: done[segment]} if segment in done else {})
            for segment, each in self._observers.items()
        ]
        return all(own)
