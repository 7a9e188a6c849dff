"""Shows an observer a pass when it is over, all layers in one go."""

from __future__ import annotations

from larder.models.forward_batch import LayerActivations, Observer


class DeferredObserver:
    """Holds what a pass of single tokens made of each layer until its last layer has gone by.

    What judges a layer in the middle of a pass finds its code and small tensors gone from the
    processor's caches, for the weights of the model went through them. Done for all layers at the
    end, the work of H2O took a quarter less time. For that, queries and what caches heard of them
    are held for every layer: of single tokens, less than a hundredth of the entries they look at.
    A pass that fails halfway has changed nothing yet. Used once.

    Args:
        observer: told everything in the order in which it happened.
        calls: how many there will be: one per layer and row.
    """

    def __init__(self, observer: Observer, calls: int) -> None:
        self._observer = observer
        self._calls = calls
        self._held: list[tuple[int, int, LayerActivations]] = []

    def __call__(self, row: int, layer: int, recorded: LayerActivations) -> None:
        self._held.append((row, layer, recorded))
        if len(self._held) == self._calls:
            held, self._held = self._held, []
            for told in held:
                self._observer(*told)
