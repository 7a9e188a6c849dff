"""Tokens per second at the largest batch that a stated KV memory holds: D2O's table of throughput.

    python benchmarks/throughput.py [--memory-mib 4096] [--model qwen3-0.6b] [--shapes 256+1024,...]

A prompt of P tokens is read and G tokens are generated. The full cache needs P + G entries per
head at the end; H2O and D2O stay at P, the budget of the paper (Wan et al., "D2O" (2024),
arXiv:2406.13035, section 5.5), so more sequences fit. Batches are as large as the memory holds,
counted in bytes of all tensors. Caches are filled with random entries; a decode step is timed at
the start, the middle and the end of generating, and the tokens per second follow from the mean of
the three, prefill left out. One JSONL line per case in results/throughput.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from _models import load_model
from _timing import environment, write

from larder import Policy
from larder.bench.filling import filled
from larder.cache.sequence import Form, SequenceCache
from larder.core.types import Mode
from larder.models.decoder import Decoder
from larder.models.passes import Row
from larder.prefill.tending import Tending

SHAPES = "256+1024,512+2048,1024+4096,2048+8192"
POLICIES = {
    "full": "full",
    "h2o": "column_mass() > uniform(tokens={tokens}) > drop() > every_step()",
    "d2o": "column_mass() > inverse_variance(tokens={tokens}) > fold_ema() > every_step()",
}
PROTECT = "protect(sinks=4, recent=0.25)"
OUT = Path("results/throughput.jsonl")


@dataclass(frozen=True)
class Case:
    """One policy on one shape."""

    policy: str
    prompt: int
    generated: int

    def held(self, progress: float) -> int:
        """Entries per head at a point of generating, 0 to 1."""
        return (
            self.prompt + round(self.generated * progress) if self.policy == "full" else self.prompt
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=["seed", "qwen3-0.6b"])
    parser.add_argument("--memory-mib", type=int, default=4096)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--steps", type=int, default=3, help="steps timed at each point")
    options = parser.parse_args()
    decoder = load_model(options.model)[1]
    for shape in options.shapes.split(","):
        prompt, generated = map(int, shape.split("+"))
        base = None
        for policy in POLICIES:
            case = Case(policy, prompt, generated)
            batch = largest(decoder, case, options.memory_mib * 2**20)
            seconds = step_seconds(decoder, case, batch, options.steps) if batch else float("inf")
            rate = batch / seconds
            base = base or rate
            print(
                f"{shape:>10} {policy:5} batch {batch:4} {rate:8.2f} tokens/s {rate / base:5.2f}x"
            )
            row = {"shape": shape, "policy": policy, "batch": batch, "tokens_per_second": rate}
            settings = {"model": options.model, "memory_mib": options.memory_mib}
            write(OUT, [row | settings | environment()])


def largest(decoder: Decoder, case: Case, memory: int) -> int:
    """How many sequences fit at the end of generating, with all that their caches hold."""
    return memory // cache_of(decoder, case, 1.0).nbytes


def cache_of(decoder: Decoder, case: Case, progress: float) -> SequenceCache:
    """A cache as the policy holds it at a point of generating, filled with random numbers."""
    policy = policy_of(case)
    form = Form.DENSE if case.policy == "full" else Form.RAGGED
    return filled(decoder, form, case.held(progress), policy.planner.ledger, 0.0)


def policy_of(case: Case) -> Policy:
    parts = POLICIES[case.policy]
    return Policy.parse(
        parts if parts == "full" else f"{PROTECT} > {parts.format(tokens=case.prompt)}"
    )


@torch.no_grad()
def step_seconds(decoder: Decoder, case: Case, batch: int, steps: int) -> float:
    """Mean over three points of generating; at each the median of some steps after a warm-up."""
    points: list[float] = []
    for progress in (0.0, 0.5, 1.0) if case.policy == "full" else (0.0,):
        one = cache_of(decoder, case, progress)
        caches = [one, *(one.fork() for _ in range(batch - 1))]
        for cache in caches:
            cache.allocate(steps + 2)
        step = stepper(decoder, case, caches)
        step()
        points.append(statistics.median([timed(step) for _ in range(steps)]))
        del caches, one
    return statistics.fmean(points)


def stepper(decoder: Decoder, case: Case, caches: list[SequenceCache]) -> Callable[[], None]:
    """One token for every cache, under the eyes of the policy."""
    policy = policy_of(case)
    quotas = (
        {}
        if case.policy == "full"
        else {layer.index: case.prompt for layer in decoder.spec.managed}
    )
    starts = tuple(cache.next_position for cache in caches)
    tending = Tending(policy.planner, case.prompt, (quotas,) * len(caches), starts)

    def step() -> None:
        rows = [Row(cache, (7,)) for cache in caches]
        numbers = list(range(len(rows)))
        observer = tending.observer(numbers, rows, [1] * len(rows)) if quotas else None
        decoder.predict(rows, Mode.APPEND, numbers, observer)

    return step


def timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
