"""Giving back to the system what was freed.

Caches come and go in all sizes, and the allocator keeps pages between them that nobody uses.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """What the C library has for that; None where it has nothing."""
    if platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None).malloc_trim


def trim_heap() -> bool:
    """Have the C library return unused pages of the whole process; whether there were any."""
    trimmer = _malloc_trim()
    return trimmer is not None and bool(trimmer(0))
