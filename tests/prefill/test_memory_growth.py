"""A long input takes no more memory than a shorter one; the full cache does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("memory_growth.py")
HEADS, BUDGET, BLOCK = 6 * 2, 1024, 512  # of the seed model, and of the script
BYTES_PER_TOKEN = HEADS * 64 * 2 * 4


def figures(kind: str, tokens: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, kind, str(tokens)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_is_flat_from_8k_to_32k_tokens() -> None:
    bounded, full = figures("bounded", 32768), figures("full", 16384)
    flat = [bounded["told"][str(n)]["rss"] for n in range(8192, 32769, 4096)]
    print(bounded, full)
    assert max(flat) <= 1.02 * min(flat)
    assert bounded["peak_entries"] <= HEADS * (BUDGET + BLOCK)
    held = [bounded["told"][str(n)]["nbytes"] for n in (8192, 32768)]
    assert held[0] == held[1]
    grown = full["told"]["16384"]["rss"] - full["told"]["8192"]["rss"]
    assert grown > 0.8 * 8192 * BYTES_PER_TOKEN
