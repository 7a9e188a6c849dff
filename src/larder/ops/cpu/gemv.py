"""Matrix products of a single bfloat16 row on a CPU, by the faster of torch's two kernels.

A decode step of one sequence multiplies one row by every weight. On processors without AMX, oneDNN
reads the weights of such a product at a fraction of the memory's bandwidth, where torch's own
kernel does not; on others it may be the other way round, so both are timed once per machine. The
two sum in a different order: outputs differ by rounding in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from larder.ops.cpu.kernel_choice import saved_choice, slowdown, thread_seconds

TIMED_WEIGHTS = (24, 576, 1536)  # 42 MB: a step finds its weights in memory, not in a cache
LEAST_GAIN = 1.25  # between kernels that are nearly equally fast, noise would choose


class _WithoutOneDNN:
    """State of the process-wide switch of oneDNN; thread-safe."""

    def __init__(self) -> None:
        self._lock, self._depth, self._before = Lock(), 0, True

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._depth == 0:
                self._before = torch.backends.mkldnn.enabled
                torch.backends.mkldnn.enabled = False
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    torch.backends.mkldnn.enabled = self._before


without_onednn = _WithoutOneDNN()


def fastest_gemv() -> AbstractContextManager[None]:
    """Context in which one bfloat16 row is multiplied by the faster kernel.

    While it is open, other threads multiply by that kernel too.
    """
    return without_onednn() if is_faster_without_onednn() else nullcontext()


@cache
def is_faster_without_onednn() -> bool:
    """True if torch's own kernel multiplies one bfloat16 row faster than oneDNN; measured once per
    machine.
    """
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    return bool(saved_choice("one bfloat16 row without oneDNN", _measure, 1))


def _measure() -> int:
    """1 if torch's own kernel is faster."""
    weights = torch.ones(TIMED_WEIGHTS, dtype=torch.bfloat16)
    row = torch.ones(1, TIMED_WEIGHTS[2], dtype=torch.bfloat16)

    def own_seconds() -> float:
        with without_onednn():
            return _seconds_of_pass(row, weights)

    return int(slowdown(own_seconds, lambda: _seconds_of_pass(row, weights)) * LEAST_GAIN < 1)


def _seconds_of_pass(row: Float[Tensor, "1 D"], weights: Float[Tensor, "W N D"]) -> float:
    """CPU seconds in which the row is multiplied by every weight once."""
    return thread_seconds(lambda: [linear(row, weight) for weight in weights])
