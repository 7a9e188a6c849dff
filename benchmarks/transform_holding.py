"""Transform-coded caches against evicted and quantized ones at equal bytes, on held-out documents.

A document is read and scored once; the plan of every policy and budget is carried out on a copy.
Compared with the full cache, in nats per token: the true continuation, and a passage of the
document that is recited after a request and its first tokens (teacher forcing). Bytes are those of
every tensor of the cache, with exact entries counted in bfloat16, relative to the full bfloat16
cache: so a model that runs in float32 is measured as in bfloat16. Calibrated tables are counted
apart.

    python benchmarks/transform_holding.py --corpus FOLDER --model smollm2 --texts 4 --tokens 1024

Writes a row per document, policy and budget to --output, and prints means.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import BudgetError, Entries, LayerScores, Mode, Observation, Plan, ScratchPrompt
from larder.engine import Engine
from larder.models import BatchSegment, LayerActivations
from larder.policy import Planner
from larder.prefill import EvictionPass, ScoringPhase
from larder.session import (
    Policy,
    common_prompts,
    empty_cache,
    entries_per_head,
    planner_with_quotas,
)
from larder_bench.datasets.corpus import read_prose
from larder_bench.scoring.kl_divergence import kl_divergence
from larder_bench.studies.size_matching import search_budget

KVZIP = "whole() > reconstruct() > global()"
POLICIES = {
    "kvzip": KVZIP,
    "kvzip > int4": f"{KVZIP} > quantized(bits=4)",
    "kvzip > int2": f"{KVZIP} > quantized(bits=2)",
    "expected > int4": "whole() > expected() > ada() > quantized(bits=4)",
    "kivi": "whole() > sinks_and_window() > uniform() > quantized(bits=2) > every_step()",
    "larder": f"{KVZIP} > transform()",
    "larder, bits=2.5": f"{KVZIP} > transform(bits=2.5)",
    "larder, bits=4": f"{KVZIP} > transform(bits=4)",
    "larder, tiers=0": f"{KVZIP} > transform(tiers=0)",
    "larder, widths": f'{KVZIP} > transform(coder="widths")',
    "expected > transform": "whole() > expected() > ada() > transform()",
}
BUDGETS = {"1/4": 0.25, "1/8": 0.125, "1/16": 0.0625}
COMPARED_BYTES = 2  # of a number in bfloat16
CUE_TOKENS = 16
SPEC_TOKENS = 64  # entries per head of a budget of nothing


@dataclass(frozen=True)
class RecordingPlanner(Planner):
    """Planner that records scores and makes no plan."""

    recorded: dict[int, LayerScores] = None  # pyright: ignore

    def plan(
        self,
        ready: Mapping[int, LayerScores],
        quotas: Mapping[int, int],
        entries: Callable[[int], Entries],
    ) -> dict[int, Plan]:
        self.recorded.update(ready)
        return {}


@dataclass
class Document:
    """Text read once: full cache, scores by scorer, and what is compared."""

    cache: SequenceCache
    scores: dict[str, dict[int, LayerScores]]
    probes: dict[str, tuple[tuple[int, ...], int]]
    logits: dict[str, Tensor]


def recorder(
    engine: Engine, policy: Policy, length: int
) -> tuple[RecordingPlanner, dict[int, int]]:
    """Planner of a policy that records, and quotas that call for a plan."""
    sized = policy.with_sizes(SPEC_TOKENS, None)
    planner, quotas = planner_with_quotas(engine.runtime, sized, SPEC_TOKENS, length)
    parts = {name: getattr(planner, name) for name in planner.__dataclass_fields__}
    return RecordingPlanner(**parts, recorded={}), quotas


def read(engine: Engine, ids: tuple[int, ...], sentences: Sequence[str]) -> Document:
    """Read a text whole and score it for every scorer of the policies."""
    decoder, length = engine.loaded.decoder, len(ids)
    policies = {str(Policy.parse(s).scorer): Policy.parse(s) for s in sentences}
    cache = SequenceCache(decoder.spec, "ragged")
    prompts = common_prompts(engine.tokenizer)
    passes, later, planners = [], [], {}
    for name, policy in policies.items():
        planner, quotas = recorder(engine, policy, length)
        planners[name] = planner
        own = EvictionPass(planner, [cache], SPEC_TOKENS, [quotas], None, [length])
        scratches = planner.scorer.scratch(ids, 0, prompts)
        (later if scratches else passes).append((own, scratches))
    for own, _ in passes:
        own.begin_pass([ScratchPrompt(ids, (0, length))], [ScoringPhase.DECIDE], 0)

    def observe(row: int, layer: int, activations: LayerActivations) -> None:
        for own, _ in passes:
            own(row, layer, activations)

    decoder.read([BatchSegment(cache, ids)], Mode.APPEND, observe, {})
    for own, scratches in later:
        for number, prompt in enumerate(scratches, 1):
            is_last = number == len(scratches)
            phase = ScoringPhase.DECIDE if is_last else ScoringPhase.ACCUMULATE
            own.begin_pass([prompt], [phase], prompt.tokens)
            segment = BatchSegment(cache, prompt.ids, shift=prompt.shift)
            decoder.read([segment], Mode.SCRATCH, own, {})
    return Document(cache, {n: p.recorded for n, p in planners.items()}, {}, {})


def held(policy: Policy, engine: Engine, document: Document, tokens: int) -> SequenceCache:
    """Copy of a read cache under a policy at a budget."""
    spec, length = engine.loaded.decoder.spec, document.cache.next_position
    sized = policy.with_sizes(tokens, None)
    entries = entries_per_head(sized, spec)
    planner, quotas = planner_with_quotas(engine.runtime, sized, entries, length)
    cache = empty_cache(sized, spec)
    for layer, store in enumerate(cache.stores):
        own = document.cache.entries(layer)
        heads = range(spec.layers[layer].kv_heads)
        keys = torch.stack([own.head_keys(head) for head in heads])
        values = torch.stack([own.head_values(head) for head in heads])
        store.append(keys, values, own.head_positions(0))
    cache.advance(length)
    ready = {}
    for layer, scored in document.scores[str(policy.scorer)].items():
        seen = Observation(
            spec.layers[layer], cache.entries(layer), torch.empty(0), torch.empty(0), length, (0, 0)
        )
        seen = planner.with_model_facts(seen)
        ready[layer] = planner.with_protection(seen, scored.scores, entries)
    plans = planner.plan(ready, quotas, cache.entries)
    for layer, plan in cache.fit_plans(plans).items():
        cache.apply(layer, plan)
    return cache


def compared_bytes(cache: SequenceCache) -> int:
    """Bytes of a cache whose exact entries are in bfloat16."""
    total = 0
    for store in cache.stores:
        extra = cache.spec.dtype.itemsize - COMPARED_BYTES
        exact = sum(store.full_precision_lengths)
        total += store.nbytes - 2 * store.layer.head_dim * extra * exact
    return total


def logits_of(engine: Engine, cache: SequenceCache, ids: tuple[int, ...], first: int) -> Tensor:
    """Logits that predict the tokens from index `first` on."""
    rows = range(first - 1, len(ids) - 1)
    return engine.loaded.decoder.forward_logits([BatchSegment(cache, ids)], Mode.SCRATCH, rows)


def measure(
    engine: Engine, document: Document, name: str, sentence: str, budget: str
) -> dict[str, object]:
    """Row of one policy and budget."""
    policy, spec = Policy.parse(sentence), engine.loaded.decoder.spec
    length = document.cache.next_position
    full = spec.managed_bytes_per_token() * COMPARED_BYTES // spec.dtype.itemsize * length
    wanted, started = int(full * BUDGETS[budget]), time.perf_counter()
    make = lambda tokens: held(policy, engine, document, tokens)  # noqa: E731
    row: dict[str, object] = {"policy": name, "budget": budget, "sentence": sentence}
    try:
        fit = search_budget(make, compared_bytes, wanted, int(length * BUDGETS[budget] / 2), length)
    except BudgetError as error:
        return row | {"refused": str(error)}
    cache = fit.result
    row |= {
        "share": compared_bytes(cache) / full,
        "kept": cache.managed_entries / (length * sum(a.kv_heads for a in spec.managed)),
        "plan_seconds": (time.perf_counter() - started) / fit.tries,
    }
    for probe, (ids, first) in document.probes.items():
        found = kl_divergence(document.logits[probe], logits_of(engine, cache, ids, first))
        row[probe] = float(found.mean())
    return row


def documents(folder: Path, engine: Engine, texts: int, tokens: int) -> list[tuple[int, ...]]:
    """Token ids of held-out documents, the longest ones of the corpus in the order of its file."""
    found = list[tuple[int, ...]]()
    for text in read_prose(folder / "prose.jsonl.xz"):
        if len(text) > 5 * tokens:
            ids = tuple(engine.tokenizer.encode(text))
            if len(ids) >= tokens:
                found.append(ids[:tokens])
        if len(found) == texts:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--following", type=int, default=64)
    parser.add_argument("--policy", action="append", help="name above, or a sentence")
    parser.add_argument("--budget", action="append", choices=list(BUDGETS))
    parser.add_argument("--output", type=Path, default=Path("results/transform_holding.jsonl"))
    options = parser.parse_args()
    torch.manual_seed(0)
    engine = Engine.load(options.model, policy="full", dtype="float32")
    chosen = {name: POLICIES.get(name, name) for name in options.policy or POLICIES}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    whole = options.tokens + options.following
    for number, ids in enumerate(documents(options.corpus, engine, options.texts, whole)):
        if number < options.first:
            continue
        document = read(engine, ids[: options.tokens], list(chosen.values()))
        start = options.tokens // 2
        passage = ids[start : start + CUE_TOKENS + options.following]
        repeat = common_prompts(engine.tokenizer)["repeat"] + passage
        probes = {
            "continuation": (ids[options.tokens :], 1),
            "recital": (repeat, len(repeat) - options.following),
        }
        logits = {n: logits_of(engine, document.cache, *probe) for n, probe in probes.items()}
        document = replace(document, probes=probes, logits=logits)
        for budget in options.budget or BUDGETS:
            for name, sentence in chosen.items():
                row = measure(engine, document, name, sentence, budget) | {"document": number}
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps({k: v for k, v in row.items() if k != "sentence"}), flush=True)


if __name__ == "__main__":
    main()
