"""Decode steps of Larder beside transformers, kvpress and llama.cpp, in turn, on one thread each.

    python benchmarks/peers/decode_steps.py --kvpress PYTHON --llama-cpp PYTHON --gguf FILE...

Sequences of 1,024 tokens in bfloat16, SmolLM2 by default; `quarter` keeps a quarter of the entries
by KeyDiff, the same for both. Each engine runs in its own process, by a Python that has it (kvpress
holds transformers back; llama.cpp through cyllama, on GGUF files as they are). Cases take turns;
printed are medians over the rounds of CPU milliseconds of a step, quartiles, tokens per CPU second,
and the ratio of each round to Larder's full cache at as many sequences, as a median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from larder.models import PACKAGED_MODELS

WORKER = Path(__file__).with_name("step_worker.py")


class Worker:
    """Process that runs the cases of one engine."""

    def __init__(self, python: str, engine: str, model: str, rows: list[int]) -> None:
        self._process = subprocess.Popen(
            [python, str(WORKER), engine, model, *map(str, rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.cases: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                return json.loads(line)
            except ValueError:  # what a library prints
                continue
        raise RuntimeError(f"{self._process.args} ended.")

    def seconds(self, case: str, steps: int) -> float:
        """CPU seconds of a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case} {steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def report(case: str, own: list[float], base: list[float]) -> None:
    """Print a row of the table."""
    rows = int(case.rpartition(" ")[2])
    low, middle, high = statistics.quantiles(own, n=4)
    ratio = statistics.median(one / other for one, other in zip(own, base, strict=True))
    print(
        f"{case:38} {middle * 1e3:7.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}) "
        f"{rows / middle:7.1f} tokens/s  {ratio:5.2f} times larder full",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode steps beside other engines.")
    parser.add_argument("--model", help="folder in the format of transformers; SmolLM2 if none")
    parser.add_argument("--engines", nargs="+", default=["larder", "transformers", "static"])
    parser.add_argument("--kvpress", metavar="PYTHON", help="a Python that has kvpress")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python that has cyllama")
    parser.add_argument("--gguf", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of a case in a round")
    chosen = parser.parse_args()
    folder = chosen.model or PACKAGED_MODELS["smollm2"].folder("smollm2")
    wanted = [(sys.executable, engine, str(folder)) for engine in chosen.engines]
    if chosen.kvpress:
        wanted.append((chosen.kvpress, "kvpress", str(folder)))
    wanted += [(chosen.llama_cpp, "llama.cpp", file) for file in chosen.gguf]
    workers = [Worker(*each, chosen.rows) for each in wanted]
    times = {case: list[float]() for worker in workers for case in worker.cases}
    for _ in range(chosen.rounds):
        for worker in workers:
            for case in worker.cases:
                times[case].append(worker.seconds(case, chosen.steps))
    for worker in workers:
        worker.close()
    for case in sorted(times, key=lambda name: (int(name.rpartition(" ")[2]), name)):
        base = times.get(f"larder full {case.rpartition(' ')[2]}", times[case])
        report(case, times[case], base)


if __name__ == "__main__":
    main()
