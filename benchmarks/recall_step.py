"""Time of a decode step over IceCache, relative to the full cache, on random weights and entries.

    python benchmarks/recall_step.py --entries 4096 16384 32768 --rounds 5
    python benchmarks/recall_step.py --entries 32768 --budget 1/4 1/16 256 --rounds 5

The model has the shape of Qwen3-0.6B unless options say otherwise. A budget is a number of entries,
or a share of them. `searched` searches at every step, `icecache` reads all entries up to the
break-even of this machine; `three calls` searches, loads and attends in a call of its own each, in
place of one call. Each round takes the cases in turn: 17 steps, in which every layer offloads 16
entries once, as `icecache` does. Medians of CPU time over all steps, their quartiles, and the
longest step of a round and of all, behind the step that builds the index.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from larder.cache import PageFetcher, SequenceCache
from larder.core import Mode, Plan
from larder.models import BatchSegment, Decoder
from larder.session import Policy, empty_cache, with_measured_recall
from larder_bench.profiling.synthetic_cache import random_cache

LAG = 16  # entries that icecache lets pile up
SINKS, RECENT = 32, 16


def random_decoder(layers: int, dtype: torch.dtype) -> Decoder:
    """Decoder in the shape of Qwen3-0.6B, with fewer layers if asked."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    model: Any = Qwen3ForCausalLM(config)
    return Decoder(model.to(dtype).eval())


def filled(decoder: Decoder, policy: Policy, entries: int) -> SequenceCache:
    """Cache of icecache behind random entries."""
    cache = empty_cache(policy, decoder.spec)
    for layer, store in zip(decoder.spec.layers, cache.layers, strict=True):
        shape = layer.kv_heads, entries, layer.head_dim
        keys, values = (torch.randn(shape).to(decoder.spec.dtype) for _ in range(2))
        store.append(keys, values, torch.arange(entries))
        offload(store, RECENT)
    cache.advance(entries)
    return cache


def offload(store: Any, recent: int) -> None:
    """Keep the first entries and the latest of every head in the fast tier."""
    if store.is_dense:
        return
    held = store.lengths[0]
    own = torch.cat([torch.arange(SINKS), torch.arange(held - recent, held)])
    kept = (torch.arange(len(store.lengths))[:, None] * held + own).flatten()
    store.apply(Plan(kept, (len(own),) * len(store.lengths)))


def step_seconds(decoder: Decoder, cache: SequenceCache, offloads: bool) -> float:
    """CPU seconds of one step."""
    started = time.process_time()
    decoder.forward_logits([BatchSegment(cache, (7,))], Mode.APPEND, [0])
    if offloads:
        for store in cache.tiers:
            offload(store, RECENT)
    return time.process_time() - started


def takes_no_call(*given: object) -> bool:
    """In place of `PageFetcher.takes_one_call`."""
    del given
    return False


def round_seconds(decoder: Decoder, name: str, cache: SequenceCache) -> list[float]:
    """CPU seconds of the steps of a case."""
    is_split = patch.object(PageFetcher, "takes_one_call", takes_no_call)
    with is_split if name.startswith("three calls") else nullcontext():
        steps = range(LAG + 1)
        return [step_seconds(decoder, cache, n == LAG and name != "full") for n in steps]


def budget_entries(budget: str, entries: int) -> int:
    """Entries of a budget, such as 256 or 1/4."""
    share = Fraction(budget)
    return int(share * entries) if share < 1 else int(share)


def build_caches(
    decoder: Decoder, entries: int, budgets: list[str], splits: bool
) -> dict[str, SequenceCache]:
    """Caches behind as many random entries, by the name of their case.

    Args:
        splits: whether to add the three calls.
    """
    measured = with_measured_recall(Policy.parse("icecache"), decoder.spec).recall
    assert measured is not None
    print(f"{entries} entries; all read up to {measured.exact or 0}")
    caches = {"full": random_cache(decoder, "dense", entries)}
    for budget in budgets:
        tokens = budget_entries(budget, entries)
        sized = Policy.parse("icecache").with_sizes(tokens, None)
        assert sized.recall is not None
        reading = replace(sized, recall=replace(sized.recall, exact=measured.exact))
        caches[f"icecache {tokens}"] = own = filled(decoder, reading, entries)
        if measured.exact and entries <= measured.exact:
            caches[f"searched {tokens}"] = own = filled(decoder, sized, entries)
        seconds = step_seconds(decoder, own, False)  # builds the index, which a fork copies
        print(f"  first step of {tokens}: {seconds:.2f} s")
        if splits:
            caches[f"three calls {tokens}"] = own.fork()
    return caches


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode step over IceCache beside the full cache.")
    parser.add_argument("--entries", type=int, nargs="*", default=[4096, 16384, 32768])
    parser.add_argument("--budget", nargs="*", default=["1/4"])
    parser.add_argument("--one-call", action="store_true", help="leave out the three calls")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    decoder = random_decoder(chosen.layers, getattr(torch, chosen.dtype))
    for entries in chosen.entries:
        caches = build_caches(decoder, entries, chosen.budget, not chosen.one_call)
        seconds: dict[str, list[list[float]]] = {name: [] for name in caches}
        for _ in range(chosen.rounds):
            for name, cache in caches.items():
                seconds[name].append(round_seconds(decoder, name, cache))
        base = statistics.median(sum(seconds["full"], []))
        for name, rounds in seconds.items():
            low, middle, high = statistics.quantiles(sum(rounds, []), n=4)
            longest = [max(own) for own in rounds]
            mean = statistics.mean(sum(rounds, []))
            print(
                f"  {name:17} {middle * 1e3:7.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}), "
                f"{middle / base:.2f} times full; mean {mean / base:.2f}, longest of a round "
                f"{statistics.median(longest) / base:.2f}, of all {max(longest) / base:.2f}"
            )


if __name__ == "__main__":
    main()
