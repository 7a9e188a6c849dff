"""Pages that nobody uses, given back."""

from __future__ import annotations

import platform
import random
from pathlib import Path

import pytest

from larder.server import trim_heap
from larder.server.persistence import sweeper

MIB = 1 << 20


def resident() -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x]
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library has no such thing")
def test_what_lies_free_between_what_is_used_goes_back() -> None:
    sizes = random.Random(0)
    held = [b"x" * sizes.randrange(400, 36_000) for _ in range(6000)]
    stays = held[::50]
    del held
    before = resident()
    assert trim_heap() and before - resident() > 40 * MIB
    assert len(stays) == 120


def test_where_there_is_no_such_thing_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "_malloc_trim", lambda: None)
    assert not trim_heap()
