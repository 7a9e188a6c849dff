"""A study on a cluster has the same rows as a local run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from larder_bench.results.rows import ENVIRONMENT, Row, read_rows, without_timings

pytestmark = pytest.mark.cluster
WORDS = ["bench", "passkey", "--tokens", "180", "--files", "6", "--policy", "streaming_llm"]
MORE = ["--control", "full", "--budget", "1/2", "--model", "random:qwen3-tiny"]


def _heed_interrupts() -> None:
    """Undo what a shell sets for background jobs, which ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(out: Path, *words: str, stop_after: int = 0) -> int:
    """Exit code of a run; interrupted once the file has a number of lines."""
    result = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result |= {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | result
    command = [sys.executable, "-m", "larder", *WORDS, *MORE, "--out", str(out), *words]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, preexec_fn=_heed_interrupts
    ) as running:
        while stop_after and running.poll() is None:
            if out.exists() and len(read_rows(out)) >= stop_after:
                running.send_signal(signal.SIGINT)
                break
            time.sleep(0.02)
        return running.wait(300)


def cells(out: Path) -> list[str]:
    """Rows without timings and environments, in an order independent of the workers.

    Each process measures up to how many rows larder's kernels are faster, which is a part of the
    environment.
    """
    rows: list[Row] = [without_timings(row) for row in read_rows(out)]
    measured = [row | {"environment": ""} for row in rows if row["row"] != ENVIRONMENT]
    return sorted(json.dumps(row, sort_keys=True) for row in measured)


def test_rows_are_the_same_on_a_cluster(tmp_path: Path) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert run(here) == 0
    assert run(there, "--ray", stop_after=2) == 130
    kept = read_rows(there)
    assert 2 <= len(kept) < len(read_rows(here))
    assert run(there, "--ray") == 0
    assert read_rows(there)[: len(kept)] == kept
    assert cells(there) == cells(here)
    described = [row["id"] for row in read_rows(there) if row["row"] == ENVIRONMENT]
    named = {row["environment"] for row in read_rows(there) if row["row"] != ENVIRONMENT}
    assert sorted(named) == sorted(described)
