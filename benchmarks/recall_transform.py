"""Recall over a slow tier of transform codes: divergence, bytes and step times against rivals.

A document is read once for each scorer; the plan of every policy is carried out on a copy, which
parks what it rejects (`larder_bench.scoring.recorded_scores`). Compared with the full cache, in
nats per token: the true continuation, and a passage of the document that is recited after a
request and its first tokens, both a token at a time, as recall works in steps. Bytes are those of
every tensor of the cache in the dtype of the model, both tiers, index and page slots included,
relative to the full cache. Steps of all caches take turns behind the continuation; printed is the
median CPU time of one, and its ratio to that over the full cache.

    python benchmarks/recall_transform.py --corpus FOLDER --tokens 4096 --texts 6 \\
        --policy "coded=256:whole() > sinks_and_window() > uniform() > park() > dci() > transform()"

Prints a row per document and policy, and appends it to --output.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from _timing import environment
from transform_fidelity import documents
from transform_step import step_seconds

from larder.cache import SequenceCache
from larder.core import Mode
from larder.engine import Engine
from larder.models import BatchSegment
from larder.session import Policy
from larder_bench.scoring.kl_divergence import kl_divergence
from larder_bench.scoring.recorded_scores import Probe, RecordedText


def stepped_logits(engine: Engine, cache: SequenceCache, probe: Probe) -> torch.Tensor:
    """Logits that predict the compared tokens of a probe, a step each behind its first tokens."""
    before, rest = probe.ids[: probe.first - 1], probe.ids[probe.first - 1 : -1]
    decoder = engine.loaded.decoder
    if before:
        decoder.read([BatchSegment(cache, before)], Mode.APPEND)
    steps = [
        decoder.forward_logits([BatchSegment(cache, (token,))], Mode.APPEND, range(1))
        for token in rest
    ]
    return torch.cat([rows.float().flatten(0, -2) for rows in steps])


def held(text: RecordedText, sentence: str, tokens: int) -> SequenceCache:
    """Cache of a policy at a number of tokens, as the copy of a recorded text."""
    return text.held(Policy.parse(sentence), tokens)


def divergences(text: RecordedText, cache: SequenceCache) -> Iterator[tuple[str, float]]:
    """Mean divergence of each probe."""
    for name, probe in text.probes.items():
        full = stepped_logits(text.engine, text.cache.fork(), probe)
        near = stepped_logits(text.engine, cache.fork(), probe)
        yield name, float(kl_divergence(full, near).mean())


def measure(
    text: RecordedText, policies: Mapping[str, tuple[int, str]], following: Sequence[int]
) -> list[dict[str, object]]:
    """Rows of the policies on one document."""
    caches = {"full": text.cache.fork()}
    rows = [{"policy": "full", "share": 1.0}]
    for name, (tokens, sentence) in policies.items():
        cache = held(text, sentence, tokens)
        row: dict[str, object] = {"policy": name, "tokens": tokens, "sentence": sentence}
        row |= divergences(text, cache)
        caches[name] = cache
        rows.append(row)
    seconds = step_seconds(text.engine, caches, following)
    for cache in caches.values():
        cache.compact()
    full = text.cache.nbytes
    base = statistics.median(seconds["full"])
    for row in rows:
        cache, own = caches[str(row["policy"])], statistics.median(seconds[str(row["policy"])])
        grown = len(following) * full / len(text.ids)
        row["share"] = round((cache.nbytes - grown) / full, 4)
        row |= {"milliseconds": round(own * 1e3, 2), "ratio": round(own / base, 3)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Recall over transform codes.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--following", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--policy",
        action="append",
        required=True,
        metavar="NAME=TOKENS:SENTENCE",
        help="repeatable",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    policies = dict[str, tuple[int, str]]()
    for given in options.policy:
        name, _, rest = given.partition("=")
        tokens, _, sentence = rest.partition(":")
        policies[name] = int(tokens), sentence
    engine = Engine.load(options.model, policy="full", dtype=options.dtype)
    print(json.dumps(environment()))
    found = list[dict[str, object]]()
    whole = options.tokens + options.following
    for number, ids in enumerate(documents(options.corpus, engine, options.texts, whole)):
        text = RecordedText.of(engine, ids, options.following)
        for row in measure(text, policies, ids[options.tokens :][: options.steps]):
            found.append(row | {"document": number})
            print(json.dumps(found[-1]), flush=True)
            if options.output:
                with options.output.open("a") as file:
                    file.write(json.dumps(found[-1]) + "\n")


if __name__ == "__main__":
    main()
