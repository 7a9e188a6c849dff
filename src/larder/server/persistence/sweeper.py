"""Background sweeper: garbage collection of a server's store and heap while it serves."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

from larder.core.errors import LarderError
from larder.store.blobs.tenant_blobs import GRACE_SECONDS
from larder.store.maintenance import TOMBSTONE_SECONDS
from larder.store.store import Store

ARENAS_VARIABLE = "MALLOC_ARENA_MAX"  # of the C library
M_ARENA_MAX, MAX_ARENAS = -8, 2
TRIM_SECONDS = 5.0  # a trim takes some ms
PRIMITIVES_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
MAX_PRIMITIVES = 32  # four or more lengths of prompts; a new one is compiled in about a ms


class StoreSweeper:
    """Thread that deletes removed data often and sweeps the whole store rarely. A context manager.

    Unused heap pages and buffers of MKL are returned to the system more often still, so that the
    memory of a server depends little on how fast requests come, and on which shapes they had.

    Args:
        seconds: between two collections of removed data.
        sweep_seconds: between two sweeps of the whole store.
        trim_seconds: between two returns of heap pages.
    """

    def __init__(
        self,
        store: Store,
        seconds: float = TOMBSTONE_SECONDS / 2,
        sweep_seconds: float = GRACE_SECONDS,
        trim_seconds: float = TRIM_SECONDS,
    ) -> None:
        self._store, self._seconds, self._sweep_seconds = store, seconds, sweep_seconds
        self._trim_seconds = min(trim_seconds, seconds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="larder sweeping", daemon=True)

    def __enter__(self) -> StoreSweeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        collected = swept = time.monotonic()
        self._do(self._store.maintenance.note_branches)
        while not self._ended.wait(self._trim_seconds):
            free_mkl_buffers()
            trim_heap()
            now = time.monotonic()
            if now - collected >= self._seconds:
                collected = now
                self._do(self._store.maintenance.forget_removed)
            if now - swept >= self._sweep_seconds:
                swept = now
                self._do(self._store.maintenance.sweep)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except LarderError as error:  # a full or slow disk is tried again in the next round
            self._store.parts.unwritten.note_error(error)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """`malloc_trim` of the C library; None if it has none."""
    library = _glibc()
    return None if library is None else library.malloc_trim


@functools.cache
def _mkl_free_buffers() -> Callable[[], int] | None:
    """`mkl_free_buffers` of the MKL that torch was built with; None if it has none."""
    import torch

    if _glibc() is None or not torch.backends.mkl.is_available():
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return library.mkl_serv_free_buffers  # its name inside of libraries
    except (OSError, AttributeError):  # a build of torch that links MKL otherwise
        return None


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def limit_heap_arenas() -> bool:
    """Have the threads of the process share few arenas of the C library's heap, as each keeps what
    is freed in it; false where the library has none, or the environment sets their number."""
    library = _glibc()
    if library is None or ARENAS_VARIABLE in os.environ:
        return False
    return bool(library.mallopt(M_ARENA_MAX, MAX_ARENAS))


def limit_primitive_cache() -> bool:
    """Have oneDNN cache few of the kernels that it compiles for each shape of its operands, of some
    40 KiB each; false where the environment sets their number. Only before its first use."""
    if any(name in os.environ for name in PRIMITIVES_VARIABLES):
        return False
    os.environ[PRIMITIVES_VARIABLES[0]] = str(MAX_PRIMITIVES)
    return True


def limit_memory() -> None:
    """Limit what libraries keep of the memory of a server's process. Before its first model."""
    limit_heap_arenas()
    limit_primitive_cache()


def free_mkl_buffers() -> bool:
    """Free the buffers that MKL caches for products of matrices, up to tens of MB that grow with
    new shapes, unless they are in use; false if torch has no MKL. Safe beside products of others.
    """
    free = _mkl_free_buffers()
    if free is not None:
        free()
    return free is not None


def trim_heap() -> bool:
    """Return unused heap pages of the process to the system; true if there were any."""
    trimmer = _malloc_trim()
    return trimmer is not None and bool(trimmer(0))
