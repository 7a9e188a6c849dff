"""Choice of an eviction policy's variant by the first requests of a server (Marconi's tuner)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread

from larder.core.spec import ModelSpec
from larder.store.eviction._replay import StateUse, best_variant
from larder.store.eviction.base import EvictionPolicy

REQUESTS_PER_EARLIER = 5  # requests that are replayed, for each before the first eviction
MAX_USES = 2048  # requests that are replayed, the latest


class EvictionTuner:
    """Eviction policy that is chosen once. For the model's thread; another one replays requests.

    Args:
        rule: the policy until then, and for good if it has no variants.
        capacity: bytes of the tier.
    """

    def __init__(self, rule: EvictionPolicy, capacity: Callable[[], int]) -> None:
        self.rule, self._capacity = rule, capacity
        self._variants = rule.variants()
        self._uses = deque[StateUse](maxlen=MAX_USES)
        self._count = self._wanted = 0
        self._thread: Thread | None = None

    @property
    def is_observing(self) -> bool:
        """True until requests are replayed."""
        return bool(self._variants) and self._thread is None

    def note_use(self, use: StateUse) -> None:
        """Record a request."""
        if not self.is_observing:
            return
        self._uses.append(use)
        self._count += 1
        if self._wanted and self._count >= self._wanted:
            self._thread = Thread(target=self._tune, args=(tuple(self._uses),), daemon=True)
            self._thread.start()

    def note_eviction(self) -> None:
        """Record an eviction; the first one decides how many requests are replayed."""
        self._wanted = self._wanted or REQUESTS_PER_EARLIER * max(1, self._count)

    def join(self) -> None:
        """Wait until requests that are being replayed have been."""
        if self._thread is not None:
            self._thread.join()

    def _tune(self, uses: Sequence[StateUse]) -> None:
        self.rule = best_variant(uses, self._variants, self._capacity())


def prefill_operations(spec: ModelSpec, num_weights: int, tokens: int) -> float:
    """Multiplications and additions that read a text, by all weights and by attention."""
    attended = sum(
        layer.query_heads * layer.head_dim * min((tokens + 1) / 2, layer.sliding_window or tokens)
        for layer in spec.layers
    )
    return float(tokens * (num_weights + 2 * attended))
