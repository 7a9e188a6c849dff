"""Retrieved documents in a server's caches, against prefix caching of whole sessions under LRU.

    python benchmarks/document_tree.py [--requests 80] [--documents 16] [--contexts 3] [--room 12]
        [--policy NAME ...]

Each request asks a new question behind documents that are drawn by popularity (Zipf), in the order
in which they are drawn. Beside a request's own, the same bytes, those of a number of documents,
hold caches of sessions on the device (`--policy full`, where the longest beginning that a session
holds is reused, and sessions leave by last use), or contexts in host memory: as a tree under
eviction by last use and by RAGCache's priority, read apart and used at any place (APE, CacheBlend),
or as they were in earlier texts (Cache-Craft, KVCOMM). Printed, and written to
results/document_tree.jsonl, is the share of prompt tokens that caches had, and of those that were
computed in all layers, known ones that were computed again included, and how many documents' bytes
the caches held between two requests, on average: sessions use what a request leaves of its own
room, too, so that they hold more than the other ones. Nothing is timed. The model
has random weights: which tokens Cache-Craft computes again depends on its attention.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from _timing import environment, write
from _virtual_server import MODEL, SlowHostRates, VirtualServer, text_of, user

from larder.engine import Engine
from larder.server import HOST_SHARE, Request
from larder.store import ByteBudgets, Tier
from larder_bench.random_models import open_model

OUT = Path("results/document_tree.jsonl")
WORDS, SEED, HOST_BYTES = 60, 3, 50_000_000
POLICIES = {
    "full": "full",
    "tree, lru": 'document_tree(eviction="lru") > unlimited()',
    "tree, gdsf": "ragcache",
    "ape": "ape",
    "cacheblend": "cacheblend",
    "cachecraft": "cachecraft",
    "kvcomm": "kvcomm",
}


def trace(requests: int, documents: int, contexts: int) -> list[tuple[str, ...]]:
    """Contexts of each request."""
    random, texts = Random(SEED), [text_of(f"doc {n}", WORDS) for n in range(documents)]
    weights, found = [1 / (rank + 1) for rank in range(documents)], list[tuple[str, ...]]()
    for _ in range(requests):
        chosen = dict[str, None]()
        while len(chosen) < contexts:
            chosen[random.choices(texts, weights)[0]] = None
        found.append(tuple(chosen))
    return found


def shares(server: VirtualServer, requests: Sequence[tuple[str, ...]]) -> dict[str, float]:
    """Share of prompt tokens that the caches had, and of those computed in all layers."""
    prompt = cached = again = held = 0
    tier = Tier.HOST if server.core.serving.policy.schedule.cache_form else Tier.DEVICE
    for number, contexts in enumerate(requests):
        turns = (user(f"Question {number}?"),)
        held += server.core.ledger.used(tier)
        answer = server.submit(Request("rag", turns, contexts=contexts, max_new_tokens=2))
        while answer.report is None:
            server.step()
        prompt += answer.report.prompt_tokens
        cached += answer.report.cached_tokens
        again += answer.report.recomputed_tokens
    return {
        "cached": cached / prompt,
        "computed": (prompt - cached + again) / prompt,
        "held_bytes": held / len(requests),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A tree of documents against sessions.")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--contexts", type=int, default=3)
    parser.add_argument("--room", type=int, default=12, help="documents that caches may hold")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="only this one")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    requests = trace(options.requests, options.documents, options.contexts)
    loaded, rows = open_model(MODEL), list[dict[str, Any]]()
    tokens = len(Engine(loaded, policy="full").tokenizer.encode(requests[0][0]))
    size = loaded.decoder.spec.full_bytes(options.room * tokens)
    one = loaded.decoder.spec.full_bytes(tokens)
    own = (options.contexts + 1) * one  # of a request with its question
    for name in options.policy or POLICIES:
        policy = POLICIES[name]
        budgets = ByteBudgets({Tier.DEVICE: 9 * own, Tier.HOST: int(size / HOST_SHARE)})
        if name == "full":  # transcripts alone are in host memory
            budgets = ByteBudgets({Tier.DEVICE: own + size, Tier.HOST: HOST_BYTES})
        server = VirtualServer(budgets, "lru", engine=Engine(loaded, policy=policy))
        server.core.tiers.rates = SlowHostRates()
        found = shares(server, requests)
        rows.append({"policy": name, **found, "room": options.room})
        summary = "{cached:.2f} of all prompt tokens cached, {computed:.2f} computed".format(
            **found
        )
        print(f"{name:10} {summary}; {found['held_bytes'] / one:.1f} documents held", flush=True)
    write(options.out, [row | {"environment": environment()} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
