"""Tokens per CPU second of decode steps over several caches at once, beside transformers' batch.

    python benchmarks/batch_step.py --model smollm2 --dtype bfloat16 --entries 1024 --rows 1 8 16
    python benchmarks/batch_step.py --model smollm2 --dtype bfloat16 --entries 4096 --memory 512
    python benchmarks/batch_step.py --model smollm2 --entries 256 --policies h2o d2o --rows 8 16
    python benchmarks/batch_step.py --model smollm2 --entries 256 --policies lacache --rows 1 8
    python benchmarks/batch_step.py --model smollm2 --rows 8 --blocks 1 2 --block-tokens 64

Caches hold random entries, in ragged ones half to one and a half of the number per head, and grow
by a token a step. Cases take turns; medians. With `--memory`, the largest batches that fit those
MiB of cache: dense caches of all entries against ragged caches of a quarter of them. With
`--policies`, steps in each form of eviction, in turn over forks of the same caches, with the CPU
time of the evictions alone where they are calls of their own: by a rule, behind the attention of
each layer, in one call behind the step, or in one for each sequence; by plans, all together or one
by one; medians and quartiles, in times of the last form. With
`--blocks`, passes in which so many more sequences read a block of tokens beside the decode steps:
attention in one call per layer beside a call for each block, in turn over forks of the same caches;
CPU and wall time of the pass and of its attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import chain, product
from typing import Any
from unittest import mock

import torch
from _timing import quartiles
from transformers import DynamicCache

from larder.cache import SequenceCache, step_layout
from larder.core import Mode
from larder.engine import Engine
from larder.models import BatchSegment, Decoder, StepLayouts, batch_segment, load
from larder.ops import BlockWork, StepWork
from larder.prefill import DecodeEviction
from larder.session import Policy, decode_planner
from larder_bench.profiling.synthetic_cache import build_synthetic_cache, random_cache

MOST_STEPS = 32  # tokens that caches have room for


def larder_step(decoder: Decoder, form: str, rows: int, entries: int) -> Callable[[], None]:
    caches = [random_cache(decoder, form, entries) for _ in range(rows)]
    for cache in caches:
        cache.allocate(MOST_STEPS)

    def step() -> None:
        segments = [BatchSegment(cache, (7,)) for cache in caches]
        decoder.forward_logits(segments, Mode.APPEND, range(rows))

    return step


def transformers_step(model: Any, decoder: Decoder, rows: int, entries: int) -> Callable[[], None]:
    cache = DynamicCache(config=model.config)
    for layer in decoder.spec.layers:
        shape = (rows, layer.kv_heads, entries, layer.head_dim)
        keys, values = torch.randn(2, *shape, dtype=decoder.spec.dtype)
        cache.update(keys, values, layer.index)
    tokens, positions = torch.full((rows, 1), 7), torch.full((rows, 1), entries)

    @torch.no_grad()
    def step() -> None:
        model(tokens, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        cache.crop(-1)

    return step


def equal_memory(decoder: Decoder, mebibytes: int, entries: int, steps: int) -> None:
    """Print tokens per CPU second of the largest batches that fit the memory."""
    sizes = {"full": ("dense", entries), "quarter": ("ragged", entries // 4)}
    rows = {
        name: (mebibytes << 20) // random_cache(decoder, *size).nbytes
        for name, size in sizes.items()
    }
    cases = {name: larder_step(decoder, form, rows[name], n) for name, (form, n) in sizes.items()}
    for name, seconds in cpu_seconds(cases, steps).items():
        print(f"{name:8} {rows[name]:3} rows {rows[name] / seconds:7.1f} tokens/s")


class EvictionForm(Enum):
    """Way in which the evictions of a decode step are carried out."""

    LAYERS = "behind each layer"  # in the call that runs the layers
    STEP = "behind the step"  # one call for all layers of all sequences
    SEQUENCES = "one call each"  # one for each sequence
    TOGETHER = "plans together"  # one call moves the entries of all plans
    PLANS = "plan by plan"


BY_RULE = EvictionForm.LAYERS, EvictionForm.STEP, EvictionForm.SEQUENCES
BY_PLANS = EvictionForm.TOGETHER, EvictionForm.PLANS


class EvictionSwitch:
    """Form of the evictions of each step, with the CPU seconds of calls for them alone."""

    def __init__(self) -> None:
        self.form, self.seconds = EvictionForm.LAYERS, 0.0
        self._evict, self._plan = step_layout.evict_sequences, StepLayouts.plan_evictions
        self._batch_plan = DecodeEviction._batch_plan  # pyright: ignore[reportPrivateUsage]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which steps take the form."""
        with (
            mock.patch.object(step_layout, "evict_sequences", self._evict_sequences),
            mock.patch.object(StepLayouts, "plan_evictions", self._of("_plan", BY_RULE[0])),
            mock.patch.object(DecodeEviction, "_batch_plan", self._of("_batch_plan", BY_PLANS[0])),
        ):
            yield

    def take(
        self,
        decoder: Decoder,
        planner: DecodeEviction | None,
        caches: Sequence[SequenceCache],
        step: int,
    ) -> float:
        """CPU seconds of a step."""
        if planner is None:
            raise SystemExit("A policy does not evict while it decodes: leave it out.")
        self.seconds, started, rows = 0.0, time.process_time(), range(len(caches))
        segments = [BatchSegment(cache, (7,)) for cache in caches]
        observer = planner.observer(rows, segments, [step] * len(rows))
        decoder.forward_logits(segments, Mode.APPEND, rows, observer)
        return time.process_time() - started

    def _of(self, name: str, form: EvictionForm) -> Callable[..., Any]:
        """Method that is called in one form alone, and gives None in others."""
        method = vars(self)[name]
        return lambda *given: method(*given) if self.form is form else None

    def _evict_sequences(
        self, evictions: Sequence[step_layout.SequenceEviction]
    ) -> list[list[int]]:
        started = time.process_time()
        if self.form is EvictionForm.SEQUENCES:
            done = [self._evict([each])[0] for each in evictions]
        else:
            done = self._evict(evictions)
        self.seconds += time.process_time() - started
        return done


def eviction_steps(
    engine: Engine, name: str, rows: int, entries: int, steps: int
) -> dict[EvictionForm, list[tuple[float, float]]]:
    """CPU seconds of steps and of their evictions in each form, over forks of the same caches."""
    runtime, policy = engine.runtime, Policy.parse(name).with_sizes(entries, None)
    first = build_synthetic_cache(runtime, policy, 4 * entries, steps + 1).cache
    first.compact()
    switch, decoder = EvictionSwitch(), runtime.decoder
    with switch.installed():
        probed, switch.form = [first.fork()], EvictionForm.STEP
        probe = decode_planner(runtime, policy, probed)
        for step in range(
            2
        ):  # a fork has its own storage, which the kernel needs, behind the first
            switch.take(decoder, probe, probed, step)
        forms = BY_RULE if switch.seconds else BY_PLANS
        caches = {form: [first.fork() for _ in range(rows)] for form in forms}
        planners = {form: decode_planner(runtime, policy, own) for form, own in caches.items()}
        for cache in chain.from_iterable(caches.values()):
            cache.allocate(steps + 1)
        seconds: dict[EvictionForm, list[tuple[float, float]]] = {form: [] for form in forms}
        for step, form in product(range(steps + 1), forms):
            switch.form = form
            taken = switch.take(decoder, planners[form], caches[form], step)
            seconds[form].append((taken, switch.seconds))
    return {form: own[1:] for form, own in seconds.items()}


class AttentionTimer:
    """Attention to blocks and decode steps with its seconds, in one call or in one for each block.

    Seconds are CPU and wall time.
    """

    def __init__(self) -> None:
        self.is_joint, self.seconds = True, [0.0, 0.0]
        self._attend = batch_segment.attend_segments

    def __call__(self, blocks: Sequence[BlockWork], step: StepWork | None) -> None:
        started = time.process_time(), time.perf_counter()
        if self.is_joint:
            self._attend(blocks, step)
        else:
            for work in (*blocks, *([] if step is None else [step])):
                work.run()
        ended = time.process_time(), time.perf_counter()
        self.seconds = [n + b - a for n, a, b in zip(self.seconds, started, ended, strict=True)]


def block_passes(decoder: Decoder, rows: int, blocks: int, chosen: argparse.Namespace) -> None:
    """Print passes of decode steps and blocks, attended to in one call against several."""
    caches = [random_cache(decoder, "ragged", chosen.entries) for _ in range(rows + blocks)]
    counts, timer = [1] * rows + [chosen.block_tokens] * blocks, AttentionTimer()
    ends = torch.tensor(counts).cumsum(0) - 1
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    with mock.patch.object(batch_segment, "attend_segments", timer):
        for step in range(2 * chosen.steps + 2):
            pairs = zip([each.fork() for each in caches], counts, strict=True)
            segments = [BatchSegment(cache, (7,) * count) for cache, count in pairs]
            timer.is_joint, timer.seconds = step % 2 == 0, [0.0, 0.0]
            started = time.process_time(), time.perf_counter()
            decoder.forward_logits(segments, Mode.APPEND, ends.tolist())
            ended = time.process_time(), time.perf_counter()
            passed = [b - a for a, b in zip(started, ended, strict=True)]
            found[timer.is_joint].append(passed + timer.seconds)
    names = "pass, CPU", "pass, wall", "attention, CPU", "attention, wall"
    for column, name in enumerate(names):
        one, each = ([own[column] for own in found[joint][1:]] for joint in (True, False))
        ratio = quartiles(one, statistics.median(each), scale=1e3, digits=2)
        print(f"{rows:3} rows {blocks:3} blocks {name:15} {ratio} one call each", flush=True)


def report_evictions(engine: Engine, chosen: argparse.Namespace) -> None:
    """Print steps of each policy and number of rows in each form, and their evictions alone."""
    for name, rows in product(chosen.policies, chosen.rows):
        found = eviction_steps(engine, name, rows, chosen.entries, chosen.steps)
        last = list(found)[-1]
        for what, column in (("step", 0), ("evictions", 1)):
            columns = {form: [own[column] for own in taken] for form, taken in found.items()}
            base = statistics.median(columns[last])
            for form, own in columns.items():
                if base and any(own):
                    ratio = quartiles(own, base, scale=1e3, digits=2)
                    print(f"{rows:3} {name:14} {what:10} {form.value:18} {ratio}", flush=True)


def cpu_seconds(cases: dict[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """Median CPU seconds of a step of each case, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(steps + 1):
        for name, step in cases.items():
            started = time.process_time()
            step()
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(own[1:]) for name, own in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode steps over several caches at once.")
    parser.add_argument("--model", default="seed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--entries", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", type=int, help="MiB of cache")
    parser.add_argument("--blocks", type=int, nargs="*", help="sequences that read a block")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--policies", nargs="*", help="policies that evict at every step")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.policies:
        report_evictions(Engine.load(chosen.model, dtype=chosen.dtype), chosen)
        return
    decoder = load(chosen.model, dtype=chosen.dtype).decoder
    decoder.share()
    if chosen.memory:
        equal_memory(decoder, chosen.memory, chosen.entries, chosen.steps)
        return
    for rows, blocks in product(chosen.rows, chosen.blocks or ()):
        block_passes(decoder, rows, blocks, chosen)
    if chosen.blocks:
        return
    for rows in chosen.rows:
        cases = {
            "DynamicCache": transformers_step(decoder.module, decoder, rows, chosen.entries),
            "dense": larder_step(decoder, "dense", rows, chosen.entries),
            "ragged": larder_step(decoder, "ragged", rows, chosen.entries),
        }
        for name, seconds in cpu_seconds(cases, chosen.steps).items():
            print(f"{rows:3} rows {name:14} {seconds * 1e3:7.1f} ms {rows / seconds:7.1f} tokens/s")


if __name__ == "__main__":
    main()
