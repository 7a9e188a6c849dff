"""Time of a decode step over IceCache, relative to the full cache, on random weights and entries.

    python benchmarks/recall_step.py --entries 4096 16384 32768 --rounds 5

The model has the shape of Qwen3-0.6B unless options say otherwise. A quarter of the entries is the
budget. `searched` searches at every step, `icecache` reads all entries up to the break-even of this
machine; `three calls` searches, loads and attends in a call of its own each, in place of one call.
Each round takes the cases in turn: 17 steps, in which every layer offloads 16 entries once, as
`icecache` does. Medians of CPU time over all steps, their quartiles, and the longest step of a
round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace
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
    with is_split if name == "three calls" else nullcontext():
        steps = range(LAG + 1)
        return [step_seconds(decoder, cache, n == LAG and name != "full") for n in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode step over IceCache beside the full cache.")
    parser.add_argument("--entries", type=int, nargs="*", default=[4096, 16384, 32768])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    decoder = random_decoder(chosen.layers, getattr(torch, chosen.dtype))
    for entries in chosen.entries:
        sized = Policy.parse("icecache").with_sizes(entries // 4, None)
        measured = with_measured_recall(Policy.parse("icecache"), decoder.spec).recall
        assert sized.recall is not None and measured is not None
        reading = replace(sized, recall=replace(sized.recall, exact=measured.exact))
        caches = {
            "full": random_cache(decoder, "dense", entries),
            "icecache": filled(decoder, reading, entries),
        }
        if measured.exact and entries <= measured.exact:
            caches["searched"] = filled(decoder, sized, entries)
        searched = caches.get("searched", caches["icecache"])
        step_seconds(decoder, searched, False)  # builds the index, which a fork copies
        caches["three calls"] = searched.fork()
        seconds: dict[str, list[list[float]]] = {name: [] for name in caches}
        for round_number in range(chosen.rounds + 1):
            for name, cache in caches.items():
                own = round_seconds(decoder, name, cache)
                if round_number:  # the first builds the index
                    seconds[name].append(own)
        base = statistics.median(sum(seconds["full"], []))
        print(f"{entries} entries; all read up to {measured.exact or 0}")
        for name, rounds in seconds.items():
            low, middle, high = statistics.quantiles(sum(rounds, []), n=4)
            longest = statistics.median(max(own) for own in rounds)
            mean = statistics.mean(sum(rounds, []))
            print(
                f"  {name:11} {middle * 1e3:7.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}), "
                f"{middle / base:.2f} times full; "
                f"mean {mean / base:.2f}, longest of a round {longest / base:.2f}"
            )


if __name__ == "__main__":
    main()
