"""Larder's data folder, counts that are measured once per machine, the principal of local use."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

HOME = "LARDER_HOME"
LOCAL_PRINCIPAL = "local"  # principal of a user at the machine itself


def home() -> Path:
    """Folder for calibrations and sessions: `$LARDER_HOME`, else `~/.cache/larder`."""
    folder = os.environ.get(HOME, "")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "larder"


def measured_count(path: Path, key: str, measure: Callable[[], int], most: int) -> int:
    """Saved count of a key; where there is none in range, the count that `measure` returns, saved.

    A file that is missing, damaged or not writable is no error: what it lacks is measured. Of
    processes that measure at once, those that end later take the number that the first one saved.
    Counts of other keys stay in the file.

    Args:
        most: largest count in range.
    """
    if (count := _saved(path, key, most)) is None:
        count = _save(path, key, measure(), most)
    return count


def _saved(path: Path, key: str, most: int) -> int | None:
    count = _load(path).get(key)
    return None if count is None or count > most else count


def _load(path: Path) -> dict[str, int]:
    """Saved counts."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    pairs = cast("dict[str, object]", known).items() if isinstance(known, dict) else ()
    return {key: count for key, count in pairs if type(count) is int and count >= 0}


def _save(path: Path, key: str, measured: int, most: int) -> int:
    """Count that another process saved in the meantime, else `measured`, which is saved.

    A lock lets one process at a time read the file and replace it, so that none loses a count.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            _lock(lock)
            if (count := _saved(path, key, most)) is None:
                temporary, count = path.with_suffix(".tmp"), measured
                temporary.write_text(json.dumps(_load(path) | {key: count}, indent=1))
                temporary.replace(path)
            return count
    except OSError:
        return measured  # the next process measures again


def _lock(file: IO[str]) -> None:
    """Lock a file until it is closed, where the platform and its file system can."""
    if sys.platform != "win32":
        import fcntl

        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
