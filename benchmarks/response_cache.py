"""Paraphrased questions: a cache of answers by meaning against prefix caching alone.

    python benchmarks/response_cache.py [--requests 200] [--questions 40] [--quota 10]

Questions about as many subjects are asked in four wordings each, by popularity (Zipf), with answers
that take longer for some. They are played on the rules of the cache alone, with an embedder: an
answer that is not given again costs its subject's seconds. Printed, and written to
results/response_cache.jsonl, are the share of seconds that was saved and the share of requests that
got the answer to another subject's question, by threshold and by what a full category keeps: the
heaviest (LEC), or the latest. Prefix caching alone saves none of the answers' seconds.

Before them stands the hit rate from which a cache saves more than its lookups cost: for the
embedder and the search that are measured, and for 6.3 ms to embed and the search times of Wang et
al., "Category-Aware Semantic Caching for Heterogeneous LLM Workloads" (2025), arXiv:2510.26835, 2
ms in memory and 30 ms in a remote index. A hit saves 207 ms in all of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from _timing import environment, write

from larder.server import ResponseCategory, ResponseEntry, TenantCategory
from larder.session import Embedder, load_embedder

OUT = Path("results/response_cache.jsonl")
SEED, COSTS = 4, (1.0, 10.0)  # seconds of a short and of a long answer
SAVED_MS, PUBLISHED_EMBED_MS = 207.0, 6.3
PUBLISHED_SEARCH_MS = {"search in memory": 2.0, "remote index": 30.0}
WORDINGS = (
    "How do I {}?",
    "What is the way to {}?",
    "Please explain how to {}.",
    "I want to {}, how does that work?",
)
VERBS = ("return", "repair", "insure", "rent", "sell", "clean", "store", "ship")
THINGS = ("a bicycle", "a camera", "a piano", "a tent", "a laptop")


class OldestFirst(TenantCategory):
    """Category that evicts the oldest answer, whatever it weighs."""

    def keep(self, entry: ResponseEntry, answer: str, cost: float, now: float) -> bool:
        if len(self.kept) >= self.rules.quota:
            self.kept.pop(0)
        return super().keep(entry, answer, cost, now)


def trace(questions: int, requests: int) -> list[tuple[int, str]]:
    """Subject and wording of each request."""
    subjects = [f"{verb} {thing}" for verb in VERBS for thing in THINGS][:questions]
    random, weights = Random(SEED), [1 / (rank + 1) for rank in range(len(subjects))]
    order = random.sample(range(len(subjects)), len(subjects))
    chosen = random.choices(order, weights, k=requests)
    return [(number, random.choice(WORDINGS).format(subjects[number])) for number in chosen]


def break_even_hit_rate(embed_ms: float, search_ms: float, saved_ms: float) -> float:
    """Hit rate from which a cache saves more than it costs: every request pays for a lookup, and
    each hit saves `saved_ms`.
    """
    return (embed_ms + search_ms) / saved_ms


def lookup_ms(embedder: Embedder, texts: Sequence[str], quota: int) -> tuple[float, float]:
    """Processor milliseconds of embedding a question, and of its search in a full category."""
    started = time.process_time()
    vectors = [embedder.embed_questions([text])[0] for text in texts]
    embedded = time.process_time()
    own = TenantCategory(ResponseCategory(threshold=1.0, ttl=1e9, quota=quota))
    for vector, text in zip(vectors[:quota], texts, strict=False):
        own.keep(ResponseEntry("", vector, text), text, 1.0, 0.0)
    searching = time.process_time()
    for vector in vectors:
        own.find("", vector, 0.0)
    searched = time.process_time()
    count = len(texts) / 1000
    return (embedded - started) / count, (searched - searching) / count


def break_even_rows(embed_ms: float, search_ms: float) -> list[dict[str, Any]]:
    """Hit rates from which lookups pay, of measured times and of published ones."""
    published = {name: (PUBLISHED_EMBED_MS, search) for name, search in PUBLISHED_SEARCH_MS.items()}
    rows = list[dict[str, Any]]()
    for name, (embed, search) in {"measured": (embed_ms, search_ms), **published}.items():
        rate = break_even_hit_rate(embed, search, SAVED_MS)
        print(
            f"{name}: {embed:.2f} ms to embed, {search:.2f} ms to search: "
            f"worth it from a hit rate of {rate:.1%}",
            flush=True,
        )
        rows.append({"lookup": name, "embed_ms": embed, "search_ms": search, "break_even": rate})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Answers by meaning against prefix caching.")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--quota", type=int, default=10)
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    asked = trace(options.questions, options.requests)
    texts, embedder = [text for _, text in asked], load_embedder(options.embedder)
    vectors = embedder.embed_questions(texts)
    costs = [COSTS[number % 3 == 0] for number in range(options.questions)]
    total = sum(costs[number] for number, _ in asked)
    rows = break_even_rows(*lookup_ms(embedder, texts, options.quota))
    for threshold in (0.7, 0.8, 0.9, 0.95):
        for name, kind in (("lec", TenantCategory), ("latest", OldestFirst)):
            own = kind(ResponseCategory(threshold=threshold, ttl=1e9, quota=options.quota))
            saved, wrong = 0.0, 0
            for second, ((number, text), vector) in enumerate(zip(asked, vectors, strict=True)):
                found = own.find("", vector, float(second))
                if found is None:
                    entry = own.note("", vector, text)
                    own.keep(entry, str(number), costs[number], float(second))
                else:
                    saved += costs[number]
                    wrong += found.answer != str(number)
            row = {"threshold": threshold, "kept": name, "saved": saved / total}
            rows.append(row | {"wrong": wrong / len(asked), "quota": options.quota})
            print(
                f"threshold {threshold:.2f}, {name:6} {rows[-1]['saved']:.2f} of all seconds "
                f"saved, {rows[-1]['wrong']:.3f} of requests wrong",
                flush=True,
            )
    write(options.out, [row | {"environment": environment()} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
