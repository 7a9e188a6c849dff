"""Several calls to a tier at once: each waits for it, and the waits need not follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_PARALLEL_CALLS = 8
Item = TypeVar("Item")
CallResult = TypeVar("CallResult")


def parallel_map(function: Callable[[Item], CallResult], items: Iterable[Item]) -> list[CallResult]:
    """What a function returns for each item; where it raises for one, all others are done first."""
    told = list(items)
    if len(told) < 2:
        return [function(each) for each in told]
    with ThreadPoolExecutor(min(MAX_PARALLEL_CALLS, len(told))) as pool:
        futures = [pool.submit(function, each) for each in told]
    return [future.result() for future in futures]
