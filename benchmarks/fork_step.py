"""Forks of one cache against copies of it: bytes, CPU time, and decode steps of all at once.

    python benchmarks/fork_step.py --model smollm2 --dtype float32 --entries 4096 --forks 8
    python benchmarks/fork_step.py --model smollm2 --dtype bfloat16 --entries 1000 --pages on

A cache of random entries is forked, and every fork decodes tokens of its own in one batch, as `n`
answers to one prompt do. A copy is what a fork was before forks shared storage. Cases take turns;
medians of CPU time. Bytes count storage, or whole pages, that several caches hold once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from larder.cache import SequenceCache, unique_nbytes
from larder.core import Mode
from larder.models import BatchSegment, Decoder, load
from larder_bench.profiling.synthetic_cache import random_cache

MEBIBYTE = 1 << 20


def copied(cache: SequenceCache) -> SequenceCache:
    return SequenceCache.adopt(cache.spec, cache.state(), cache.meta())


WAYS: dict[str, Callable[[SequenceCache], SequenceCache]] = {
    "copies": copied,
    "forks": SequenceCache.fork,
}


def cpu_seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def held_bytes(caches: list[SequenceCache]) -> int:
    """Bytes of caches, what several of them hold counted once."""
    if caches[0].spec.arena is None:
        return unique_nbytes(caches)
    held = 0
    for leases in zip(*(cache.page_leases() for cache in caches), strict=True):
        held += len({page for lease in leases for page in lease.pages}) * leases[0].page_bytes
    return held


def step(decoder: Decoder, caches: list[SequenceCache]) -> None:
    segments = [BatchSegment(cache, (7,)) for cache in caches]
    decoder.forward_logits(segments, Mode.APPEND, range(len(caches)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Forks of a cache against copies of it.")
    parser.add_argument("--model", default="seed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--form", default="ragged")
    parser.add_argument("--entries", type=int, default=4096)
    parser.add_argument("--forks", type=int, default=8)
    parser.add_argument("--pages", default="off")
    parser.add_argument("--steps", type=int, default=9)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    decoder = load(chosen.model, dtype=chosen.dtype, pages=chosen.pages).decoder
    decoder.share()
    source = random_cache(decoder, chosen.form, chosen.entries)
    taken = {
        name: statistics.median(cpu_seconds(lambda way=way: way(source)) for _ in range(5))
        for name, way in WAYS.items()
    }
    caches = {name: [way(source) for _ in range(chosen.forks)] for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(chosen.steps + 1):
        for name, own in caches.items():
            seconds[name].append(cpu_seconds(lambda own=own: step(decoder, own)))
    print(f"source {source.nbytes / MEBIBYTE:.1f} MiB, {chosen.form}, {chosen.entries} entries")
    for name, own in caches.items():
        held = held_bytes([source, *own]) / MEBIBYTE
        print(
            f"{name:7} one takes {taken[name] * 1e3:7.2f} ms; {chosen.forks} behind "
            f"{chosen.steps + 1} tokens, with the source: {held:7.1f} MiB; "
            f"step {statistics.median(seconds[name][1:]) * 1e3:7.1f} ms"
        )


if __name__ == "__main__":
    main()
