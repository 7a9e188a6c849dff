"""Gains and losses of prefetching and of shared searches, layer by layer, on real text.

    python benchmarks/recall_prefetch.py DIALOGUE [--tokens 8192] [--steps 32] [--policy icecache]

The seed model reads the last tokens of a conversation and decodes the same tokens in every case,
over pages that are searched in turn; ahead, with queries predicted from the layer before; and by
the first of every --layers layers for all of them. For each layer with offloaded entries:

    ahead      share of pages found in turn that were prefetched as well
    shared     share of entries found in turn that the first layer of its cycle found
    hit        share of requested pages that were in the fast tier already: in turn / shared
    find       microseconds per step of searching and moving, in turn / shared
    worker     microseconds per step of the worker's search and moves
    waited     part of these that the layer had to wait for
    hidden     1 - waited / worker

JSONL goes to results/recall_prefetch.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _timing import environment, write

from larder import Policy, read_conversation
from larder.cache import PageFetcher, SequenceCache
from larder.core import FetchMode, Mode
from larder.models import BatchSegment, Decoder, load
from larder.prefill import PeakMemoryMeter
from larder.session import ModelRuntime, TokenizerAdapter, build_caches, decode_planner

OUT = Path("results/recall_prefetch.jsonl")
WARMUPS = 4


@dataclass
class PrefetchStats:
    """Measurements of one variant by layer, over all steps but the first few."""

    seconds: dict[str, dict[int, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    found: list[dict[int, list[set[int]]]] = field(default_factory=list)
    hits: dict[int, float] = field(default_factory=dict)
    agreement: dict[int, tuple[int, int]] = field(default_factory=dict)

    def micros(self, part: str, layer: int, steps: int) -> float:
        return round(1e6 * self.seconds[part][layer] / steps, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dialogue", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--policy", default="icecache")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument(
        "--layers", type=int, default=3, help="number of layers that share a search"
    )
    parser.add_argument("--dense", type=int, default=None, help="number of dense layers")
    options = parser.parse_args()
    loaded = load("seed")
    tokenizer = TokenizerAdapter(loaded.tokenizer)
    ids = tokenizer.encode_conversation(read_conversation(options.dialogue)).ids
    ids = (ids * (1 + options.tokens // len(ids)))[-options.tokens :]
    runtime = ModelRuntime(loaded.decoder, tokenizer, _no_embedder, lambda names: {})
    policy = Policy.parse(options.policy).with_sizes(options.budget, None)
    if options.dense is not None:
        policy = replace(policy, recall=replace(policy.recall, dense=options.dense))
    variants = {
        "turn": policy,
        "ahead": replace(policy, recall=replace(policy.recall, fetch=FetchMode.AHEAD)),
        "compared": replace(policy, recall=replace(policy.recall, fetch=FetchMode.COMPARED)),
        "shared": replace(policy, recall=replace(policy.recall, layers=options.layers)),
    }
    decoded = tuple(ids[: options.steps + WARMUPS])
    stats = {
        name: _run_variant(runtime, variant, ids, decoded) for name, variant in variants.items()
    }
    rows = _rows(stats, options.steps, options.layers)
    settings = {name: str(value) for name, value in vars(options).items()} | {"policy": str(policy)}
    print(*(f"{name:>8}" for name in rows[0]))
    for row in rows:
        print(*(f"{'-' if value is None else value:>8}" for value in row.values()))
    write(OUT, [settings | row | environment() for row in rows])


def _no_embedder(name: str) -> Any:
    raise SystemExit(f"{name} is needed: take a policy without episodes.")


@torch.no_grad()
def _run_variant(
    runtime: ModelRuntime, policy: Policy, ids: tuple[int, ...], decoded: tuple[int, ...]
) -> PrefetchStats:
    cache = build_caches(runtime, policy, ids, [{}], PeakMemoryMeter()).activate(0)
    planner = decode_planner(runtime, policy, [cache])
    stats = PrefetchStats()
    for step, token in enumerate(decoded):
        if step == WARMUPS:
            before = {tier.layer.index: tier.pages for tier in cache.tiers}
            stats.seconds.clear()
        with _clocks(stats):
            _read(runtime.decoder, cache, token, planner, step)
        if step >= WARMUPS:
            stats.found.append(_found(cache))
    for tier in cache.tiers:
        requested, moved = (
            now - then for now, then in zip(tier.pages, before[tier.layer.index], strict=True)
        )
        if requested:
            stats.hits[tier.layer.index] = round(1 - moved / requested, 3)
        stats.agreement[tier.layer.index] = tier.fetcher.agreement
    return stats


def _read(decoder: Decoder, cache: SequenceCache, token: int, planner: Any, step: int) -> None:
    row = BatchSegment(cache, (token,))
    observer = None if planner is None else planner.observer([0], [row], [step])
    decoder.forward_logits([row], Mode.APPEND, [0], observer)


def _found(cache: SequenceCache) -> dict[int, list[set[int]]]:
    """Entries of each set that each layer's own search found in this step, by layer."""
    found: dict[int, list[set[int]]] = {}
    for tier in cache.tiers:
        choice = tier.fetcher.selection
        if choice is not None and tier.leader is None:
            found[tier.layer.index] = [{*own} - {-1} for own in choice.numbers.flatten(1).tolist()]
    return found


@contextmanager
def _clocks(stats: PrefetchStats) -> Iterator[None]:
    """Measure page search and transfer: `find` in turn, `worker` ahead, `waited` for the worker."""
    names = {
        "_found": "find",
        "selection_calls": "find",
        "fetch": "worker",
        "_take_prefetched": "waited",
    }
    former = {name: getattr(PageFetcher, name) for name in names}
    inside = [False]  # a worker's search does not count as one in turn

    def clocked(name: str) -> Any:
        def run(self: PageFetcher, *args: Any) -> Any:
            if name == "_found" and inside[0]:
                return former[name](self, *args)
            inside[0] = inside[0] or name == "fetch"
            started = time.perf_counter()
            try:
                return former[name](self, *args)
            finally:
                spent = time.perf_counter() - started
                stats.seconds[names[name]][self.layer.index] += spent
                if name == "fetch":
                    inside[0] = False

        return run

    for name in names:
        setattr(PageFetcher, name, clocked(name))
    try:
        yield
    finally:
        for name, inner in former.items():
            setattr(PageFetcher, name, inner)


def _rows(stats: dict[str, PrefetchStats], steps: int, layers: int) -> list[dict[str, Any]]:
    turn, parking = stats["turn"], sorted(stats["turn"].found[0])
    rows: list[dict[str, Any]] = []
    for index, layer in enumerate(parking):
        leader = parking[index - index % layers]
        pages, common = stats["compared"].agreement[layer]
        worker = stats["ahead"].micros("worker", layer, steps)
        waited = stats["ahead"].micros("waited", layer, steps)
        rows.append(
            {
                "layer": layer,
                "ahead": round(common / pages, 3) if pages else None,
                "shared": _overlap(turn, layer, leader) if leader != layer else None,
                "hit": turn.hits.get(layer),
                "hit_sh": stats["shared"].hits.get(layer),
                "find": turn.micros("find", layer, steps),
                "find_sh": stats["shared"].micros("find", layer, steps),
                "worker": worker or None,
                "waited": waited if worker else None,
                "hidden": round(1 - waited / worker, 3) if worker else None,
            }
        )
    return rows


def _overlap(stats: PrefetchStats, layer: int, leader: int) -> float | None:
    """Share of a layer's entries that another layer found in the same steps."""
    own = common = 0
    for found in stats.found:
        if layer in found and leader in found:
            for mine, other in zip(found[layer], found[leader], strict=True):
                own, common = own + len(mine), common + len(mine & other)
    return round(common / own, 3) if own else None


if __name__ == "__main__":
    main()
