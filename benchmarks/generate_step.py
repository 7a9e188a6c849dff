"""Time of a decode step of `model.generate` over a LarderCache, relative to a DynamicCache.

    python benchmarks/generate_step.py --model smollm2 --context 1024

Steps over the caches take turns, so that a busy machine slows all of them alike; the median of
each is printed, with its ratio to that of DynamicCache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache

from larder.interop.cache import LarderCache
from larder.models.loader import load

POLICIES = {"full": None, "snapkv": 256, "h2o": 256}


def filled(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Caches by name, each after the prompt."""
    caches: dict[str, Any] = {"DynamicCache": DynamicCache(config=model.config)}
    for name, budget in POLICIES.items():
        caches[name] = LarderCache(model, name, budget)
    for cache in caches.values():
        model(ids, past_key_values=cache, logits_to_keep=1)
    return caches


def step_seconds(model: Any, caches: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """Seconds of each step by cache, the caches in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    token = torch.tensor([[5]])
    for _ in range(steps):
        for name, cache in caches.items():
            started = time.perf_counter()
            model(token, past_key_values=cache, logits_to_keep=1)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a decode step over a LarderCache.")
    parser.add_argument("--model", default="seed")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=32)
    chosen = parser.parse_args()
    decoder = load(chosen.model, dtype="float32").decoder
    decoder.share()
    model = decoder.module
    ids = torch.randint(3, decoder.vocab_size, (1, chosen.context))
    with torch.no_grad():
        seconds = step_seconds(model, filled(model, ids), chosen.steps)
    base = statistics.median(seconds["DynamicCache"])
    for name, own in seconds.items():
        middle = statistics.median(own)
        print(f"{name:14}{1000 * middle:8.1f} ms  {middle / base:5.2f}")


if __name__ == "__main__":
    main()
