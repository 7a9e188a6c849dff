"""Tiny results that every figure finds something in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from larder_bench.results.rows import Row

ENVIRONMENT: Row = {"schema": 1, "row": "environment", "id": "e", "larder": "0", "cpu": "<fast>"}
SCORES = {"snapkv": 0.5, "h2o": 0.25, "random": 0.0, "full": 1.0}


def cell(
    policy: str, tokens: int = 1000, seed: int = 0, budget: str = "1/4", **more: object
) -> Row:
    right = int(SCORES.get(policy, 0.0) * 4)
    items = [
        {"kind": "needle", "depth": n / 4, "exact": n < right, "f1": None, "counts": True}
        for n in range(4)
    ]
    if policy == "full":  # layers of a profile
        items = [{**item, "question": n, "similarity": 1 - n / 8} for n, item in enumerate(items)]
    full = tokens * 100
    held = full if policy == "full" else full // 4
    return {
        "schema": 1,
        "row": "cell",
        "environment": "e",
        "study": "small",
        "model": "seed",
        "model_fingerprint": "m",
        "task": "needles(needles=4)",
        "tokens": tokens,
        "seed": seed,
        "policy": policy,
        "spelling": f"{policy}()",
        "budget": "1/1" if policy == "full" else "1/4",
        "matched": "bytes",
        "measure": "forced",
        "device": "cpu",
        "dtype": "float32",
        "context_tokens": tokens,
        "budget_tokens": 250,
        "full_kv_bytes": full,
        "kv_bytes": 2 * held,
        "active_kv_bytes": held,
        "peak_kv_bytes": 3 * held,
        "bytes_share": held / full,
        "prefill_seconds": 1.0 + seed,
        "latency": {"first_token": {"p50": 0.5, "p95": 0.75}, "token": {"p50": 0.25, "p95": 0.5}},
        "items": items,
        **more,
    }


def exhibit(kind: str, policy: str = "snapkv", **data: object) -> Row:
    head: Row = {"schema": 1, "row": kind, "environment": "e", "study": "small", "model": "seed"}
    result = {"task": "needles()", "tokens": 1000, "seed": 0, "spelling": "", "budget": "64"}
    return head | {"policy": policy} | result | data


def segment(index: int, episode: int, **more: object) -> Row:
    text = f"Segment {index} says & asks little."
    result = {"place": index, "episode": episode, "x": float(index), "y": float(episode)}
    return {**result, "similarity": 0.5, "representative": index % 2 == 0, "text": text, **more}


CELLS = [
    cell(policy, tokens, seed) for policy in SCORES for tokens in (1000, 2000) for seed in (0, 1)
]
EXHIBITS = [
    exhibit(
        "budgets",
        episode=0,
        context_tokens=1000,
        lengths=[[10, 30], [5, 5], [20, 40]],
        sliding_layers=[1],
    ),
    exhibit(
        "clusters",
        context_tokens=1000,
        embedder="words",
        map={"method": "t-SNE", "perplexity": 2.0, "seed": 0},
        episodes=[{"topics": ["cats"]}, {"topics": []}],
        segments=[segment(index, index // 4) for index in range(8)],
    ),
    *(
        exhibit("prompt", seed=seed, percentile=rank, items=[{"exact": rank in (None, 5)}])
        for rank in (5, 95, None)
        for seed in (0, 1)
    ),
    *(
        exhibit("recall", part, fetched_tokens=n, layer=None, step=None, recall={"1": n / 64})
        for part in ("dci", "flat")
        for n in (16, 32)
    ),
    *(
        exhibit(
            "eviction",
            rule,
            budget=str(share),
            needed_share=share,
            hit_tokens=share * 80,
            known_tokens=100,
            hit_seconds=share,
            known_seconds=2.0,
        )
        for rule in ("lru", "clairvoyant")
        for share in (0.25, 0.5)
    ),
    exhibit(
        "breakdown",
        step="token",
        parts=[{"name": "search", "p50": 0.25}, {"name": "decode", "p50": 0.5}],
    ),
]


def write_rows(folder: Path, rows: Sequence[Row]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ENVIRONMENT, *rows)))
    return path
