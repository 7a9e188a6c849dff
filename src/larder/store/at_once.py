"""Several calls to a tier at once: each waits for it, and the waits need not follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOST = 8
Item = TypeVar("Item")
Result = TypeVar("Result")


def at_once(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What a function returns for each item; where it raises for one, all others are done first."""
    told = list(items)
    if len(told) < 2:
        return [function(each) for each in told]
    with ThreadPoolExecutor(min(MOST, len(told))) as pool:
        futures = [pool.submit(function, each) for each in told]
    return [future.result() for future in futures]
