"""Limits of library caches, and the return of unused heap pages and buffers."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from larder.server import StoreSweeper, trim_heap
from larder.server.persistence import sweeper
from larder.store import Store

MIB = 1 << 20


def resident() -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x]
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library has no such thing")
def test_trim_returns_free_pages_between_used_ones() -> None:
    sizes = random.Random(0)
    held = [b"x" * sizes.randrange(400, 36_000) for _ in range(6000)]
    stays = held[::50]
    del held
    before = resident()
    assert trim_heap() and before - resident() > 40 * MIB
    assert len(stays) == 120


PROGRAM = """
import ctypes, sys, threading
from larder.server.persistence.sweeper import limit_heap_arenas
print(limit_heap_arenas())
end, held = threading.Barrier(9), []
def hold():
    held.append([ctypes.create_string_buffer(9000) for _ in range(50)])
    end.wait()
threads = [threading.Thread(target=hold) for _ in range(8)]
for each in threads: each.start()
end.wait()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
sys.stdout.flush()
libc.malloc_info(0, ctypes.c_void_p(file := libc.fdopen(1, b"w")))
libc.fflush(ctypes.c_void_p(file))
"""


def arenas(**variables: str) -> tuple[str, int]:
    """Result of `limit_heap_arenas` in a process, and its number of arenas with eight threads."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[0], done.stdout.count("<heap nr=")


@pytest.mark.extended
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library has no such thing")
def test_malloc_arenas_default_to_two_unless_set_in_the_environment() -> None:
    assert arenas() == ("True", 2)
    printed, count = arenas(MALLOC_ARENA_MAX="6")
    assert printed == "False" and count > 2


SHAPES = """
import torch
from larder.server.persistence.sweeper import limit_primitive_cache
print(limit_primitive_cache())
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
    for rows in (*range(1, 101), 90, 1):
        torch.nn.functional.gelu(torch.zeros(rows, 64))
"""


def compiled(**variables: str) -> tuple[str, int]:
    """`True` if a process has limited its cache of kernels, and how many it compiles for
    activations of a hundred shapes, a late one and the first of them twice."""
    done = subprocess.run(
        [sys.executable, "-c", SHAPES],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    [printed] = {"True", "False"}.intersection(done.stdout.splitlines())
    return printed, done.stdout.count("cache_miss")


@pytest.mark.extended
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_primitive_cache_is_limited_unless_set_in_the_environment() -> None:
    printed, with_limit = compiled()
    assert printed == "True"
    printed, without = compiled(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024")
    assert printed == "False" and (with_limit, without) == (101, 100)


def test_trim_without_malloc_trim_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "_malloc_trim", lambda: None)
    assert not trim_heap()


def mkl_buffer_bytes() -> int:
    """Bytes that MKL has allocated for buffers of products, in use or not."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library.mkl_serv_mem_stat.restype = ctypes.c_int64
    return library.mkl_serv_mem_stat(ctypes.byref(ctypes.c_int()))


def products(seed: int, count: int) -> bool:
    """True if products of matrices of some shapes are right."""
    drawn = torch.Generator().manual_seed(seed)
    for rows in torch.randint(2, 500, (count,), generator=drawn).tolist():
        left = torch.randn(rows, 384, generator=drawn)
        right = torch.randn(384, 384, generator=drawn)
        exact = (left.double() @ right.double()).float()
        if not torch.allclose(left @ right, exact, atol=1e-3):
            return False
    return True


with_mkl = pytest.mark.skipif(
    not sweeper.free_mkl_buffers(), reason="torch has no MKL that frees buffers"
)


@with_mkl
def test_buffers_of_mkl_are_freed() -> None:
    assert products(0, 20) and mkl_buffer_bytes() > MIB
    assert sweeper.free_mkl_buffers() and mkl_buffer_bytes() == 0
    assert products(0, 20)


@with_mkl
@pytest.mark.extended
def test_products_beside_freed_buffers_are_right() -> None:
    results = list[bool]()
    threads = [
        threading.Thread(target=lambda seed=seed: results.append(products(seed, 60)))
        for seed in range(3)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sweeper.free_mkl_buffers()
    assert results == [True] * 3


def test_buffers_without_mkl_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "_mkl_free_buffers", lambda: None)
    assert not sweeper.free_mkl_buffers()


def test_sweeper_frees_buffers_and_heap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both, done = threading.Event(), list[str]()

    def free(name: str) -> bool:
        done.append(name)
        if len(done) > 3:
            both.set()
        return True

    monkeypatch.setattr(sweeper, "free_mkl_buffers", lambda: free("buffers"))
    monkeypatch.setattr(sweeper, "trim_heap", lambda: free("heap"))
    store = Store(str(tmp_path / "blobs"), tmp_path / "home", secret=b"s" * 32)
    with StoreSweeper(store, trim_seconds=0.001):
        assert both.wait(30)
    store.close()
    assert done[:4] == ["buffers", "heap", "buffers", "heap"]
