"""Counts that are measured once per machine and saved as JSON, such as break-even lengths."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast


def measured_count(path: Path, key: str, measure: Callable[[], int], most: int) -> int:
    """Saved count of a key; where there is none in range, the count that `measure` returns, saved.

    A file that is missing, damaged or not writable is no error: what it lacks is measured. Of
    processes that measure at once, those that end later take the number that the first one saved.

    Args:
        most: largest count in range.
    """
    if (count := _load(path, most).get(key)) is None:
        measured = measure()
        known = _load(path, most)
        count = known.setdefault(key, measured)
        _save(path, known)
    return count


def _load(path: Path, most: int) -> dict[str, int]:
    """Saved counts in range."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    pairs = cast("dict[str, object]", known).items() if isinstance(known, dict) else ()
    return {key: n for key, n in pairs if type(n) is int and 0 <= n <= most}


def _save(path: Path, known: dict[str, int]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=1))
        temporary.replace(path)
    except OSError:
        return  # the next process measures again
