"""What the benchmarks share: the environment, result lines."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from larder.bench.rows import append


def environment() -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add result lines to a JSONL file."""
    append(path, rows)
