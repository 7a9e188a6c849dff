"""Timing, environment and result lines of benchmarks."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from larder_bench.results.rows import append_rows

RUNS = 3


def shortest_run(run: Callable[[], Any]) -> tuple[Any, float]:
    """Result of a function, and the shortest of its durations in seconds."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        made = run()
        times.append(time.perf_counter() - start)
    return made, min(times)


def environment() -> dict[str, Any]:
    """Environment that figures depend on."""
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append result lines to a JSONL file."""
    append_rows(path, rows)


def quartiles(seconds: Sequence[float], base: float, scale: float = 1.0, digits: int = 2) -> str:
    """Median of durations with its quartiles, and its ratio to that of another.

    Args:
        scale: of the printed durations: 1 for seconds, 1000 for milliseconds.
    """
    low, middle, high = (scale * x for x in statistics.quantiles(seconds, n=4))
    unit = "s" if scale == 1.0 else "ms"
    spread = f"{low:.{digits}f} to {high:.{digits}f}"
    return f"{middle:7.{digits}f} {unit} ({spread}), {middle / (scale * base):.2f} times"
