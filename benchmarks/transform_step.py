"""Decode steps over transform-coded caches, relative to the full cache, and the cost of coding.

A document is read once by the first policy; its scores serve the others, and the plan of each is
carried out at each budget on a copy. Steps over the full cache and the others take turns, so that a
busy machine slows all alike; printed are the median CPU time of a step and its ratio to the full
cache's, bits of a coded number, and what fitting and coding took of reading.

    python benchmarks/transform_step.py --corpus FOLDER --model smollm2 --tokens 4096
    python benchmarks/transform_step.py --corpus FOLDER --policy "larder, range coder"

Budgets are shares of the full cache's bytes in the dtype of the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from _timing import environment
from transform_fidelity import POLICIES, documents

from larder.cache import SequenceCache, TransformLayer
from larder.core import Mode
from larder.engine import Engine
from larder.models import BatchSegment
from larder.session import Policy
from larder_bench.scoring.recorded_scores import RecordedText

SHARES = {"1/4": 0.25, "1/8": 0.125, "1/16": 0.0625}


Key = tuple[str, str]  # policy, and budget
Name = TypeVar("Name")


def caches_of(
    text: RecordedText, policies: dict[str, Policy]
) -> tuple[dict[Key, SequenceCache], dict[Key, float]]:
    """Caches of each policy and budget, and the CPU seconds that planning and coding took."""
    length = len(text.ids)
    caches, seconds = dict[Key, SequenceCache](), dict[Key, float]()
    for name, policy in policies.items():
        text.held(policy, length // 8)  # compiles kernels
        for budget, share in SHARES.items():
            started = time.process_time()
            caches[name, budget] = text.held(policy, int(length * share))
            seconds[name, budget] = time.process_time() - started
    return caches, seconds


def bits_of(cache: SequenceCache) -> float:
    """Bits of a number of the transform layers' coded entries, their positions included."""
    layers = map(cache.step_layer, range(len(cache.spec.layers)))
    tiers = [layer.tier for layer in layers if isinstance(layer, TransformLayer)]
    numbers = sum(len(tier) * 2 * tier.tables.mean.shape[2] for tier in tiers)
    return sum(tier.payload.nbytes + tier.index.nbytes for tier in tiers) * 8 / max(numbers, 1)


def step_seconds(
    engine: Engine, caches: Mapping[Name, SequenceCache], ids: Sequence[int]
) -> dict[Name, list[float]]:
    """CPU seconds of each step by cache, the caches in turn, after two steps each to warm up."""
    seconds: dict[Name, list[float]] = {name: [] for name in caches}
    for token in ids:
        for name, cache in caches.items():
            started = time.process_time()
            segment = BatchSegment(cache, (token,))
            engine.loaded.decoder.forward_logits([segment], Mode.APPEND, range(1))
            seconds[name].append(time.process_time() - started)
    return {name: own[2:] for name, own in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode steps over transform-coded caches.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        help="name in transform_fidelity.py, or a sentence; may be given several times "
        "(default: larder)",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = Engine.load(options.model, policy="full", dtype=options.dtype)
    names = options.policy or ["larder"]
    policies = {name: Policy.parse(POLICIES.get(name, name)) for name in names}
    whole = options.tokens + options.steps + 1
    ids = documents(options.corpus, engine, 1, whole)[0]
    text = RecordedText.of(engine, ids, options.steps + 1)
    started = time.process_time()
    text.scores(policies[names[0]])  # reads the document under the policy, and scores it
    reading = time.process_time() - started
    coded, coding = caches_of(text, policies)
    print(json.dumps({"policies": [str(policy) for policy in policies.values()], **environment()}))
    caches = {("full", "1"): text.cache, **coded}
    seconds = step_seconds(engine, caches, ids[options.tokens :])
    base = statistics.median(seconds["full", "1"])
    for (name, budget), own in seconds.items():
        middle = statistics.median(own)
        row = {"policy": name, "budget": budget, "milliseconds": round(middle * 1e3, 2)}
        row["ratio"] = round(middle / base, 3)
        if (name, budget) in coding:
            row["bits"] = round(bits_of(coded[name, budget]), 4)
            row["coding_share_of_reading"] = round(coding[name, budget] / reading, 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
