"""Progress of work that takes a while: callbacks, and stages of the work."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

# Called as work is done: (done so far, total), in the unit of the stage.
Progress = Callable[[int, int], None]

# Opens a stage of some work, given a label such as `Reading` and the unit that it counts; yields
# the callback of the stage.
ProgressStage = Callable[[str, str], AbstractContextManager[Progress]]


def no_progress(done: int, total: int) -> None:
    """Null progress callback."""
    del done, total


@contextmanager
def silent_stage(doing: str, unit: str) -> Generator[Progress]:
    """`ProgressStage` that reports nothing."""
    yield no_progress
