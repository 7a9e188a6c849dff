"""Timing, environment and result lines of benchmarks."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
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
