"""Speed of prefill and decoding, as ratios in one run against the usual alternatives.

    python benchmarks/speed.py [prefill] [decode] [scoring] [episodes] [--model seed|qwen3-0.6b]

prefill   16K tokens read block by block at M = 1024 against the full cache, Larder's and
          transformers' own.
decode    one token after 16K entries per head against 1K, caches filled with random numbers:
          Larder's dense and ragged caches, transformers' DynamicCache.
scoring   cost of scoring: a policy's prefill against the same schedule with random scores.
episodes  E caches built one after the other against all in one batched pass: seconds and peak.

`qwen3-0.6b` is a random-weight model in that shape. Medians over interleaved rounds; one JSONL line
per case in results/speed.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _inputs import load_model
from _timing import environment, write
from transformers import DynamicCache

from larder import Policy
from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder
from larder.prefill import PeakMemoryMeter, PrefillReader, PrefillSequence
from larder_bench.profiling.synthetic_cache import random_cache
from larder_bench.profiling.timing import interleaved, percentiles

LONG, SHORT, BLOCK, MEAN = 16384, 1024, 512, 1024
OUT = Path("results/speed.jsonl")
SCORED_POLICIES = {
    "random": "random() > uniform(tokens=1024)",
    "streaming_llm": "sinks_and_window() > uniform(tokens=1024)",
    "keydiff": "keydiff() > uniform(tokens=1024)",
    "snapkv": "snapkv() > pooled(tokens=1024)",
    "patched (64 tokens)": 'patched(prompt="summarize") > pooled(tokens=1024)',
    "patched (400 tokens)": 'patched(prompt="episode") > pooled(tokens=1024)',
    "kvzip": "reconstruct() > pooled(tokens=1024)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["prefill", "decode", "scoring", "episodes"])
    parser.add_argument("--model", default="seed", choices=["seed", "qwen3-0.6b"])
    parser.add_argument("--tokens", type=int, default=LONG)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    module, decoder = load_model(options.model)
    parts: dict[str, Callable[..., dict[str, list[float]]]] = {
        "prefill": _prefill,
        "decode": _decode,
        "scoring": _scoring,
        "episodes": _episodes,
    }
    for part in options.parts:
        print(f"\n{part}: {options.model}, {options.tokens} tokens")
        seconds = parts[part](module, decoder, options.tokens, options.rounds)
        _print_results(part, options, seconds)


def _prefill(module: Any, decoder: Decoder, tokens: int, rounds: int) -> dict[str, list[float]]:
    ids = _ids(decoder, tokens)
    full = Policy.parse("full")
    cases = {
        "transformers, DynamicCache": lambda: _own_prefill(module, ids),
        "larder, full": lambda: _read(decoder, full, [()], ids),
    }
    for name in ("keydiff", "snapkv", "patched (400 tokens)"):
        policy, prompt = _blockwise(name), _ids(decoder, 400)
        cases[f"larder, {name}"] = lambda p=policy, q=prompt: _read(decoder, p, [q], ids)
    return interleaved(cases, rounds)


def _decode(module: Any, decoder: Decoder, tokens: int, rounds: int) -> dict[str, list[float]]:
    long, short = (random_cache(decoder, "dense", tokens), random_cache(decoder, "ragged", SHORT))
    own_long, own_short = _own_filled(module, decoder, tokens), _own_filled(module, decoder, SHORT)
    cases = {
        f"transformers, {tokens} entries": lambda: _own_step(module, own_long, tokens),
        f"transformers, {SHORT} entries": lambda: _own_step(module, own_short, tokens),
        f"larder dense, {tokens} entries": lambda: _step(decoder, long),
        f"larder ragged, {SHORT} entries": lambda: _step(decoder, short),
    }
    return interleaved(cases, rounds * 5, warmups=2)


def _scoring(module: Any, decoder: Decoder, tokens: int, rounds: int) -> dict[str, list[float]]:
    del module
    ids = _ids(decoder, tokens)
    cases = {}
    for name in SCORED_POLICIES:
        prompt = _ids(decoder, 64 if "64" in name else 400)
        policy = _blockwise(name)
        cases[name] = lambda p=policy, q=prompt: _read(decoder, p, [q], ids)
    return interleaved(cases, rounds)


def _episodes(module: Any, decoder: Decoder, tokens: int, rounds: int) -> dict[str, list[float]]:
    del module
    ids, prompts = _ids(decoder, tokens), [_ids(decoder, 400 + i) for i in range(4)]
    prompts = [prompt[:400] for prompt in prompts]
    policy_spelling = SCORED_POLICIES["patched (400 tokens)"]
    peaks: dict[str, int] = {}
    cases = {}
    for name, together in (("E passes", "1"), ("one batched pass", '"all"')):
        policy = Policy.parse(f"episodic(tokens={BLOCK}, together={together}) > {policy_spelling}")

        def run(policy: Policy = policy, name: str = name) -> None:
            peaks[name] = _read(decoder, policy, prompts, ids).peak_bytes

        cases[name] = run
    seconds = interleaved(cases, rounds)
    for name, peak in peaks.items():
        print(f"  peak of {name}: {peak / 2**20:.1f} MiB")
        write(OUT, [{"part": "episodes", "case": name, "peak_kv_bytes": peak}])
    return seconds


def _blockwise(name: str) -> Policy:
    return Policy.parse(f"blockwise(tokens={BLOCK}) > {SCORED_POLICIES[name]}")


def _read(
    decoder: Decoder, policy: Policy, prompts: list[tuple[int, ...]], ids: tuple[int, ...]
) -> PeakMemoryMeter:
    """Prefill token ids into one cache per prompt, as a session does."""
    planner, meter = policy.planner, PeakMemoryMeter()
    tokens = policy.budget.tokens or MEAN
    layers = tuple(layer.index for layer in decoder.spec.managed)
    quotas = planner.quotas(tokens, len(ids), layers, {})
    form = "dense" if tokens > len(ids) else "ragged"
    lanes = [
        PrefillSequence(
            SequenceCache(decoder.spec, form, planner.ledger),
            dict.fromkeys(("episode", "summarize"), prompt) | {"repeat": prompt[:16]},
        )
        for prompt in prompts
    ]
    policy.schedule.read(PrefillReader(decoder, planner, tokens, quotas, meter), lanes, ids, _quiet)
    return meter


def _quiet(done: int, total: int) -> None:
    del done, total


def _ids(decoder: Decoder, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(count)
    top = min(decoder.vocab_size, 4096)
    return tuple(torch.randint(6, top, (count,), generator=generator).tolist())


@torch.no_grad()
def _step(decoder: Decoder, cache: SequenceCache) -> None:
    mark = cache.next_position
    decoder.forward_logits([BatchSegment(cache, (7,))], Mode.APPEND, [0])
    cache.truncate(mark)


@torch.no_grad()
def _own_prefill(module: Any, ids: tuple[int, ...]) -> None:
    cache = DynamicCache(config=module.config)
    for start in range(0, len(ids), SHORT):
        module.model(torch.tensor([ids[start : start + SHORT]]), past_key_values=cache)


def _own_filled(module: Any, decoder: Decoder, entries: int) -> DynamicCache:
    cache = DynamicCache(config=module.config)
    for layer in decoder.spec.layers:
        shape = (1, layer.kv_heads, entries, layer.head_dim)
        cache.update(torch.randn(shape), torch.randn(shape), layer.index)
    return cache


@torch.no_grad()
def _own_step(module: Any, cache: DynamicCache, position: int) -> None:
    positions = torch.tensor([[position]])
    module(torch.tensor([[7]]), position_ids=positions, past_key_values=cache, logits_to_keep=1)
    cache.crop(-1)


def _print_results(part: str, options: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    base = percentiles(next(iter(seconds.values())))["p50"]
    rows = []
    for name, values in seconds.items():
        figures = percentiles(values)
        print(f"  {name:34} {figures['p50']:9.4f} s   {base / figures['p50']:6.2f}x the first")
        rows.append(
            {"part": part, "case": name, "model": options.model, "tokens": options.tokens}
            | figures
            | {"rounds": options.rounds}
            | environment()
        )
    write(OUT, rows)


if __name__ == "__main__":
    main()
