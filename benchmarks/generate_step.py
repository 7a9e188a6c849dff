"""Time of a decode step of `model.generate` over a LarderCache, relative to a DynamicCache.

    python benchmarks/generate_step.py --model smollm2 --dtype bfloat16 --context 4096 --threads 1

Each policy keeps a quarter of the context. Steps over the caches take turns, so that a busy machine
slows all of them alike; the median CPU time of each is printed with its ratio to that of
DynamicCache, with quartiles, and with the time in which the machine reads the step's bytes (the
weights and the cache) from memory once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from _timing import quartiles
from transformers import DynamicCache

from larder.interop import LarderCache
from larder.models import load

POLICIES = ("full", "keydiff", "snapkv", "h2o", "d2o", "icecache")
COPIED_FLOATS = 1 << 26  # 256 MiB, more than any cache of a processor


def filled(model: Any, ids: torch.Tensor, policies: list[str]) -> dict[str, Any]:
    """Caches by name, each after the prompt."""
    caches: dict[str, Any] = {"DynamicCache": DynamicCache(config=model.config)}
    for name in policies:
        caches[name] = LarderCache(model, name, None if name == "full" else ids.shape[1] // 4)
    for name, cache in caches.items():
        model(ids, past_key_values=cache, logits_to_keep=1)
        print(f"{name}: prompt of {ids.shape[1]} tokens", flush=True)
    return caches


def step_seconds(model: Any, caches: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """CPU seconds of each step by cache, the caches in turn, after one step each to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    token = torch.tensor([[5]])
    for _ in range(steps + 1):
        for name, cache in caches.items():
            started = time.process_time()
            model(token, past_key_values=cache, logits_to_keep=1)
            seconds[name].append(time.process_time() - started)
    return {name: own[1:] for name, own in seconds.items()}


def read_bandwidth() -> float:
    """Bytes per CPU second that a sum over a large array reads; the best of five."""
    numbers, best = torch.ones(COPIED_FLOATS), float("inf")
    for _ in range(5):
        started = time.process_time()
        numbers.sum()
        best = min(best, time.process_time() - started)
    return numbers.nbytes / best


def bytes_of_step(model: Any, cache: DynamicCache) -> int:
    """Bytes of the weights, a tied embedding table once, and of the cache."""
    weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    return sum(weights.values()) + sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a decode step over a LarderCache.")
    parser.add_argument("--model", default="seed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    decoder = load(chosen.model, dtype=chosen.dtype).decoder
    decoder.share()
    model = decoder.module
    ids = torch.randint(3, decoder.vocab_size, (1, chosen.context))
    with torch.no_grad():
        caches = filled(model, ids, chosen.policies)
        seconds = step_seconds(model, caches, chosen.steps)
    limit = bytes_of_step(model, caches["DynamicCache"]) / read_bandwidth()
    print(f"{'reading the bytes once':24} {limit * 1e3:7.1f} ms")
    base = statistics.median(seconds["DynamicCache"])
    for name, own in seconds.items():
        print(f"{name:24} {quartiles(own, base, scale=1e3, digits=1)} DynamicCache")


if __name__ == "__main__":
    main()
