"""Perplexity, bytes and time of a step of `aqua()`, on documents that were not trained on.

Every document is read a few tokens at a time into a full cache and into one whose tokens are coded,
so that all but the latest tokens are predicted from what was decoded. Bytes are those that the
caches hold at the end; the step is the median of single tokens read behind the document, the two
caches in turn. Weights are those of `larder train`:

    larder train aqua --model smollm2 --corpus FOLDER --held-out SOURCE
    python benchmarks/aqua.py --model smollm2 --corpus FOLDER --held-out SOURCE

One document of 1024 tokens takes about 40 seconds of one core.
"""

from __future__ import annotations

import json
import math
import time
from statistics import fmean, median

import torch
from learned_scores import corpus_options, texts

from larder.cache import SequenceCache
from larder.core import Mode
from larder.engine import Engine
from larder.evaluation import Bootstrap
from larder.models import BatchSegment
from larder.session import Policy, empty_cache
from larder.training import read_corpus

STEPS = 24  # single tokens that are timed
POLICIES = {
    "full": "whole() > unlimited()",
    "aqua": "whole() > sinks_and_window() > uniform(kept=1.0) > aqua(bits=2)",
}


def a_cache(engine: Engine, sentence: str, tokens: int) -> SequenceCache:
    """Empty cache of a policy that keeps all tokens."""
    policy = Policy.parse(sentence)
    if "unlimited" not in sentence:
        policy = policy.with_sizes(tokens, None, tokens)
    return empty_cache(policy, engine.runtime.decoder.spec)


def read(engine: Engine, cache: SequenceCache, ids: tuple[int, ...]) -> torch.Tensor:
    """Logits behind each token, which is appended."""
    segment = BatchSegment(cache, ids, (len(ids),))
    logits = engine.runtime.decoder.forward_logits([segment], Mode.APPEND, [*range(len(ids))])
    return logits.float()


def log_loss(engine: Engine, cache: SequenceCache, ids: tuple[int, ...], block: int) -> float:
    """Mean negative log-likelihood of all tokens but the first, read in blocks."""
    parts = [read(engine, cache, ids[at : at + block]) for at in range(0, len(ids), block)]
    return float(torch.nn.functional.cross_entropy(torch.cat(parts)[:-1], torch.tensor(ids[1:])))


def step_seconds(engine: Engine, cache: SequenceCache, token: int) -> float:
    started = time.perf_counter()
    read(engine, cache, (token,))
    return time.perf_counter() - started


def measured(engine: Engine, ids: tuple[int, ...], block: int) -> dict[str, dict[str, float]]:
    """Log loss, bytes and seconds of a step of each policy."""
    caches = {name: a_cache(engine, sentence, len(ids)) for name, sentence in POLICIES.items()}
    found = {name: {"nll": log_loss(engine, own, ids, block)} for name, own in caches.items()}
    for name, own in caches.items():
        own.compact()
        found[name]["bytes"] = float(own.nbytes)
    times = {name: list[float]() for name in caches}
    for step in range(STEPS):
        for name, own in caches.items():
            times[name].append(step_seconds(engine, own, ids[step]))
    for name, own in times.items():
        found[name]["step"] = median(own)
    return found


def main() -> None:
    parser = corpus_options(__doc__, tokens=1024, documents=12)
    parser.add_argument("--block", type=int, default=32)
    args = parser.parse_args()
    engine = Engine.load(args.model, policy="full", dtype=args.dtype)
    corpus = read_corpus(args.corpus, args.held_out)
    rows = list[dict[str, dict[str, float]]]()
    for document, ids in texts(engine, corpus, args.tokens, args.documents, args.seed):
        rows.append(measured(engine, ids[: args.tokens], args.block))
        print(json.dumps({"document": document.name, **rows[-1]}), flush=True)
    losses = {name: [row[name]["nll"] for row in rows] for name in POLICIES}
    less = Bootstrap().difference([[x] for x in losses["aqua"]], [[x] for x in losses["full"]])
    for name in POLICIES:
        own = {key: fmean(row[name][key] for row in rows) for key in ("nll", "bytes", "step")}
        print(f"{name:6} perplexity {math.exp(own['nll']):.3f}  {own['bytes']:,.0f} bytes", end="")
        print(f"  {1000 * own['step']:.1f} ms a step  n={len(rows)}")
    low, mean, high = (100 * math.expm1(x) for x in (less.low, less.mean, less.high))
    print(f"perplexity of aqua above the full cache: {mean:.2f} % [{low:.2f} {high:.2f}]")


if __name__ == "__main__":
    main()
