"""Transform-coded caches against evicted and quantized ones at equal bytes, on held-out documents.

A document is read once for each scorer; the plan of every policy and budget is carried out on a
copy (`larder_bench.scoring.recorded_scores`). Compared with the full cache, in nats per token: the
true continuation, and a passage of the document that is recited after a request and its first
tokens (teacher forcing). Bytes are those of every tensor of the cache, with exact entries counted
in bfloat16, relative to the full bfloat16 cache: so a model that runs in float32 is measured as in
bfloat16. Calibrated tables are counted apart.

    python benchmarks/transform_fidelity.py --corpus FOLDER --model smollm2 --texts 4 --tokens 1024

Writes a row per document, policy and budget to --output. With --summary FILE ... nothing is
measured: means of such rows are printed, with the ratio of `larder` to every other policy and its
95 % interval of a paired bootstrap over documents.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch

from larder.core import BudgetError
from larder.engine import Engine
from larder.evaluation import Bootstrap
from larder.session import Policy
from larder_bench.datasets.corpus import read_prose
from larder_bench.scoring.kl_divergence import kl_divergence
from larder_bench.scoring.recorded_scores import (
    RecordedText,
    compared_bytes,
    compared_full_bytes,
    forced_logits,
)
from larder_bench.studies.target_size import search_budget

KVZIP = "whole() > reconstruct() > global()"
EXPECTED = "whole() > expected() > ada()"
POLICIES = {
    "kvzip": KVZIP,
    "kvzip > int4": f"{KVZIP} > quantized(bits=4)",
    "kvzip > int2": f"{KVZIP} > quantized(bits=2)",
    "expected > int4": f"{EXPECTED} > quantized(bits=4)",
    "kivi": "whole() > sinks_and_window() > uniform() > quantized(bits=2) > every_step()",
    "larder": f"{KVZIP} > transform()",
    "larder, bits=2.5": f"{KVZIP} > transform(bits=2.5)",
    "larder, bits=4": f"{KVZIP} > transform(bits=4)",
    "larder, tiers=0": f"{KVZIP} > transform(tiers=0)",
    "larder, range coder": f'{KVZIP} > transform(coder="entropy")',
    "larder, widths": f'{KVZIP} > transform(coder="widths")',
    "expected > transform": f"{EXPECTED} > transform()",
    "rdkv": "whole() > snapkv(kernel=1) > global() > rdkv()",
    "kvzip > rdkv": f"{KVZIP} > rdkv(window=0)",
    "kvzip > turboquant3": f"{KVZIP} > turboquant(bits=3)",
    "kvzip > turboquant4": f"{KVZIP} > turboquant(bits=4)",
    "kvzip > outliers": f"{KVZIP} > quantized(bits=3, outliers=0.01)",
    "mikv": "whole() > snapkv() > sum() > group_sum() > uniform() > mikv()",
    "kvgrad > int4": "whole() > kvgrad() > global() > quantized(bits=4)",
    "lukv > int4": "whole() > expected() > lukv() > quantized(bits=4)",
    "compactor > int4": "whole() > compactor() > uniform() > quantized(bits=4)",
    "kvzap > int4": "whole() > kvzap() > global() > quantized(bits=4)",
}
BUDGETS = {"1/4": 0.25, "1/8": 0.125, "1/16": 0.0625}
PROBES = {"next": "continuation", "recited": "recital"}  # and their names in rows


def measure(
    text: RecordedText, name: str, sentence: str, budget: str, guess: float
) -> dict[str, object]:
    """Row of one policy and budget.

    Args:
        guess: budget in tokens that fits, as a share of the text.
    """
    policy, length, full = Policy.parse(sentence), len(text.ids), compared_full_bytes(text)
    wanted, started = int(full * BUDGETS[budget]), time.perf_counter()
    row: dict[str, object] = {"policy": name, "budget": budget, "sentence": sentence}
    try:
        fit = search_budget(
            lambda tokens: text.held(policy, tokens),
            compared_bytes,
            wanted,
            int(length * guess),
            length,
        )
    except BudgetError as error:
        return row | {"refused": str(error)}
    cache = fit.result
    row |= {
        "share": compared_bytes(cache) / full,
        "tokens_share": fit.tokens / length,
        "kept": cache.managed_entries / (length * sum(a.kv_heads for a in cache.spec.managed)),
        "plan_seconds": (time.perf_counter() - started) / fit.tries,
    }
    for probe, ids in text.probes.items():
        found = kl_divergence(text.logits[probe], forced_logits(text.engine, cache, ids))
        row[PROBES[probe]] = float(found.mean())
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


def summary(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Means of each policy and budget, and the ratios of `larder` to it, over shared documents."""
    held = {(r["policy"], r["budget"], r["document"]): r for r in rows if "refused" not in r}
    found: list[dict[str, object]] = []
    for policy, budget in dict.fromkeys((name, size) for name, size, _ in held):
        shared = sorted(
            document
            for name, size, document in held
            if (name, size) == (policy, budget) and ("larder", size, document) in held
        )
        row: dict[str, object] = {"policy": policy, "budget": budget, "documents": len(shared)}
        for probe in PROBES.values():
            own, ours = (
                {str(d): [float(held[name, budget, d][probe])] for d in shared}  # pyright: ignore
                for name in (policy, "larder")
            )
            row[probe] = round(fmean(each[0] for each in own.values()), 5)
            if policy != "larder" and len(shared) > 1:
                ratio = Bootstrap().ratio(list(ours.values()), list(own.values()))
                ends = ratio.mean, ratio.low, ratio.high
                row[f"{probe} ratio"] = [round(end, 3) for end in ends]
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--following", type=int, default=64)
    parser.add_argument("--policy", action="append", help="name above, or a sentence")
    parser.add_argument("--budget", action="append", choices=list(BUDGETS))
    parser.add_argument("--output", type=Path, default=Path("results/transform_fidelity.jsonl"))
    parser.add_argument("--summary", type=Path, nargs="+", help="files of rows")
    options = parser.parse_args()
    if options.summary:
        lines = [line for path in options.summary for line in path.read_text().splitlines()]
        for row in summary([json.loads(line) for line in lines]):
            print(json.dumps(row))
        return
    torch.manual_seed(0)
    engine = Engine.load(options.model, policy="full", dtype="float32")
    chosen = {name: POLICIES.get(name, name) for name in options.policy or POLICIES}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    whole = options.tokens + options.following
    guesses = dict[tuple[str, str], float]()
    for number, ids in enumerate(documents(options.corpus, engine, options.texts, whole)):
        if number < options.first:
            continue
        text = RecordedText.of(engine, ids, options.following)
        for budget in options.budget or BUDGETS:
            for name, sentence in chosen.items():
                guess = guesses.get((name, budget), BUDGETS[budget] / 2)
                row = measure(text, name, sentence, budget, guess) | {"document": number}
                guesses[name, budget] = 0.995 * float(str(row.get("tokens_share", guess)))
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps({k: v for k, v in row.items() if k != "sentence"}), flush=True)


if __name__ == "__main__":
    main()
