"""Decode speed with a slow tier: a policy that offloads against the full cache, and a breakdown.

    python benchmarks/recall_decode.py [--tokens 16384,32768] [--policy icecache] [--budget 256]

One token after the other is decoded over a cache with synthetic keys and values (see
larder_bench.profiling.synthetic_keys), with a random-weight model in the shape of Qwen3-0.6B,
float32. `full` is Larder's dense cache, preallocated; `transformers` is its DynamicCache; the
policy's cache is evicted as during generation, so that offloading and indexing are included. A
round is a whole window of the policy's timing, and as many steps of the others; rounds alternate.
Caches that do not fit into memory together are measured one after the other (--apart).

Results are milliseconds per step; use the minimum of all rounds on shared machines. The breakdown
comes from a run of its own, by the clocks of larder_bench.profiling.step_profiler.

`hit` is the share of requested pages that were in the fast tier already; synthetic queries keep a
search target for --stays steps. JSONL goes to results/recall_decode.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _inputs import load_model
from _timing import environment, write
from transformers import DynamicCache

from larder import Policy
from larder.cache import OffloadBatch, SequenceCache, TieredLayer
from larder.core import Mode
from larder.models import BatchSegment, Decoder
from larder.prefill import DecodeEviction
from larder.session import entries_per_head
from larder_bench.profiling.step_profiler import profile_steps
from larder_bench.profiling.synthetic_keys import (
    KeyQueryStream,
    draw_stream,
    draw_values,
    inject_streams,
)

Clock = Callable[[], float]
OUT = Path("results/recall_decode.jsonl")
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
STEPS, WARMUPS = 16, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="16384,32768")
    parser.add_argument("--policy", default="icecache")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stays", type=int, default=4, help="steps of one search target")
    parser.add_argument(
        "--apart", type=int, default=16384, help="measure separately from this number of tokens on"
    )
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own number")
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--cases", default="full,policy,transformers", help="measured caches")
    parser.add_argument("--model", default="qwen3-0.6b", choices=["seed", "qwen3-0.6b"])
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    module, decoder = load_model(options.model)
    for tokens in map(int, options.tokens.split(",")):
        row = _measure(module, decoder, tokens, options)
        settings = {"policy": options.policy, "budget": options.budget, "model": options.model}
        settings |= {"tokens": tokens, "rounds": options.rounds, "stays": options.stays}
        settings |= {"clock": options.clock}
        print(f"\n{settings}", *(f"  {name}: {value}" for name, value in row.items()), sep="\n")
        write(OUT, [settings | row | environment()])


@torch.no_grad()
def _measure(
    module: Any, decoder: Decoder, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    steps = STEPS * (options.rounds + WARMUPS + 2)
    streams = [draw_stream(layer, tokens, steps, options.stays) for layer in decoder.spec.layers]
    row, clock = dict[str, Any](), CLOCKS[options.clock]
    makers: dict[str, Callable[[], Callable[[], None]]] = {
        "full": lambda: _full(decoder, streams, clock, row),
        "policy": lambda: _policy(decoder, streams, options, row),
        "transformers": lambda: _transformers(module, decoder, streams),
    }
    chosen = {name: makers[name] for name in options.cases.split(",")}
    if tokens < options.apart:
        cases = {name: make() for name, make in chosen.items()}
        seconds = _interleaved(cases, options.rounds, clock)
    else:
        seconds = {}
        for name, make in chosen.items():
            seconds |= _interleaved({name: make()}, options.rounds, clock)
            gc.collect()  # an injected cache refers to itself
    least = {name: 1e3 * min(each) / STEPS for name, each in seconds.items()}
    row |= {f"{name}_ms": [round(1e3 * s / STEPS, 1) for s in v] for name, v in seconds.items()}
    row |= {f"{name}_least_ms": round(each, 1) for name, each in least.items()}
    for name in chosen.keys() - {"policy"}:
        row[f"ratio_to_{name}"] = round(least[name] / least["policy"], 2)
    return row


def _interleaved(
    cases: Mapping[str, Callable[[], None]], rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Seconds of each case; cases alternate, caches are already warm."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            started = clock()
            run()
            seconds[name].append(clock() - started)
    return seconds


def _full(
    decoder: Decoder, streams: Sequence[KeyQueryStream], clock: Clock, row: dict[str, Any]
) -> Callable[[], None]:
    cache = SequenceCache(decoder.spec, "dense")
    tokens = streams[0].keys.shape[1]
    for layer, stream, store in zip(decoder.spec.layers, streams, cache._layers, strict=True):
        store.allocate(tokens + 64)
        store.append(stream.keys, draw_values(decoder.spec, layer, tokens), torch.arange(tokens))
    cache.next_position = tokens
    set_step = inject_streams([cache], streams)

    def run() -> None:
        for step in range(STEPS):
            set_step(step)
            decoder.forward_logits([BatchSegment(cache, (7 + step,))], Mode.APPEND, [0])
        cache.truncate(tokens)

    run()
    row["full_bytes"] = cache.nbytes
    row["full_parts"] = _parts(run, clock)
    return run


def _policy(
    decoder: Decoder,
    streams: Sequence[KeyQueryStream],
    options: argparse.Namespace,
    row: dict[str, Any],
) -> Callable[[], None]:
    policy, clock = (
        Policy.parse(options.policy).with_sizes(options.budget, None),
        CLOCKS[options.clock],
    )
    cache, planner = _parked(decoder, policy, streams, clock, row), policy.planner
    layers = [layer for layer in decoder.spec.managed if cache.is_budgeted(layer)]
    tokens = streams[0].keys.shape[1]
    fast = entries_per_head(policy, decoder.spec)
    quotas = planner.quotas(fast, tokens, tuple(layer.index for layer in layers), {})
    eviction = DecodeEviction(planner, fast, (quotas,), (tokens,), decoder.predict_token_numbers)
    set_step, done = inject_streams([cache], streams), [0]

    def run() -> None:
        for _ in range(STEPS):
            set_step(done[0])
            only = BatchSegment(cache, (7 + done[0],))
            observer = eviction.observer([0], [only], [done[0]])
            decoder.forward_logits([only], Mode.APPEND, [0], observer)
            done[0] += 1

    for _ in range(WARMUPS):  # the second is the first one to index entries offloaded by the first
        run()
    before = cache.pages
    row["policy_parts"] = _parts(run, clock)
    requested, moved = (now - then for now, then in zip(cache.pages, before, strict=True))
    row["hit"] = round(1 - moved / max(requested, 1), 3)
    row["policy_fast_bytes"], row["policy_bytes"] = cache.device_nbytes, cache.nbytes
    row["policy_entries"] = cache.lengths()[-1][0]
    return run


def _parked(
    decoder: Decoder,
    policy: Policy,
    streams: Sequence[KeyQueryStream],
    clock: Clock,
    row: dict[str, Any],
) -> SequenceCache:
    """Cache after a long text: both ends in the fast tier, all other entries offloaded and
    indexed.
    """
    cache = SequenceCache(decoder.spec, "tiered", policy.planner.ledger, parking=policy.parking)
    near = entries_per_head(policy, decoder.spec)
    first = policy.scorer.protected_tokens().union(policy.protect.least(near)).first
    tokens, seconds = streams[0].keys.shape[1], 0.0
    for layer, stream, store in zip(decoder.spec.layers, streams, cache._layers, strict=True):
        assert isinstance(store, TieredLayer)
        values = draw_values(decoder.spec, layer, tokens)
        stays = torch.ones(tokens, dtype=torch.bool)
        if cache.is_budgeted(layer):
            stays[first : tokens - (near - first)] = False
        held, far = torch.nonzero(stays).flatten(), torch.nonzero(~stays).flatten()
        store.allocate(len(held) + 64)
        store.append(stream.keys[:, held], values[:, held], held)
        if len(far):
            lengths = torch.full((layer.kv_heads,), len(far))
            flat = [part[:, far].flatten(0, 1) for part in (stream.keys, values)]
            columns = torch.zeros(len(policy.planner.ledger.columns), int(lengths.sum()))
            store._slow.add(OffloadBatch(*flat, far.repeat(layer.kv_heads), columns, lengths))
            started = clock()
            store.fetcher.update_index(store._slow.entries(), store._observed)
            seconds += clock() - started
    cache.next_position = tokens
    row["built_s"] = round(seconds, 1)
    return cache


def _transformers(
    module: Any, decoder: Decoder, streams: Sequence[KeyQueryStream]
) -> Callable[[], None]:
    cache, tokens = DynamicCache(config=module.config), streams[0].keys.shape[1]
    for layer, stream in zip(decoder.spec.layers, streams, strict=True):
        values = draw_values(decoder.spec, layer, tokens)
        cache.update(stream.keys[None], values[None], layer.index)

    def run() -> None:
        for step in range(STEPS):
            positions = torch.tensor([[tokens + step]])
            ids = torch.tensor([[7 + step]])
            module(ids, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        cache.crop(-STEPS)

    run()
    return run


def _parts(run: Callable[[], None], clock: Clock) -> dict[str, float]:
    """Milliseconds per step of each part."""
    with profile_steps(clock) as profiler:
        parts = profiler.step(run)
    return {name: round(1e3 * seconds / STEPS, 2) for name, seconds in parts.items()}


if __name__ == "__main__":
    main()
