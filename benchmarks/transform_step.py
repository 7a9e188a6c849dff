"""Decode steps over transform-coded caches, relative to the full cache, and the cost of coding.

A document is read once by a policy; its plan is carried out at each budget on a copy. Steps over
the full cache and the others take turns, so that a busy machine slows all alike; printed are the
median CPU time of a step and its ratio to the full cache's, and what fitting and coding took of
reading.

    python benchmarks/transform_step.py --corpus FOLDER --model smollm2 --tokens 4096

Budgets are shares of the full cache's bytes in the dtype of the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from _timing import environment
from transform_fidelity import POLICIES, documents

from larder.cache import SequenceCache
from larder.core import Mode
from larder.engine import Engine
from larder.models import BatchSegment
from larder.session import Policy
from larder_bench.scoring.recorded_scores import RecordedText

SHARES = {"1/4": 0.25, "1/8": 0.125, "1/16": 0.0625}


def caches_of(
    text: RecordedText, policy: Policy
) -> tuple[dict[str, SequenceCache], dict[str, float]]:
    """Caches of each budget, and the CPU seconds that planning and coding took."""
    length = len(text.ids)
    caches, seconds = dict[str, SequenceCache](), dict[str, float]()
    text.held(policy, length // 8)  # compiles kernels
    for name, share in SHARES.items():
        started = time.process_time()
        caches[name] = text.held(policy, int(length * share))
        seconds[name] = time.process_time() - started
    return caches, seconds


def step_seconds(
    engine: Engine, caches: dict[str, SequenceCache], ids: tuple[int, ...]
) -> dict[str, list[float]]:
    """CPU seconds of each step by cache, the caches in turn, after one step each to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    for token in ids:
        for name, cache in caches.items():
            started = time.process_time()
            segment = BatchSegment(cache, (token,))
            engine.loaded.decoder.forward_logits([segment], Mode.APPEND, range(1))
            seconds[name].append(time.process_time() - started)
    return {name: own[1:] for name, own in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode steps over transform-coded caches.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--policy", default="larder", help="name in transform_fidelity.py, or a sentence"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = Engine.load(options.model, policy="full", dtype=options.dtype)
    sentence = POLICIES.get(options.policy, options.policy)
    whole = options.tokens + options.steps + 1
    ids = documents(options.corpus, engine, 1, whole)[0]
    text, policy = RecordedText.of(engine, ids, options.steps + 1), Policy.parse(sentence)
    started = time.process_time()
    text.scores(policy)  # reads the document under the policy, and scores it
    reading = time.process_time() - started
    caches, coding = caches_of(text, policy)
    print(json.dumps({"policy": sentence, **environment()}))
    caches = {"full": text.cache, **caches}
    seconds = step_seconds(engine, caches, ids[options.tokens :])
    base = statistics.median(seconds["full"])
    for name, own in seconds.items():
        middle = statistics.median(own)
        row = {"budget": name, "milliseconds": round(middle * 1e3, 2)}
        row["ratio"] = round(middle / base, 3)
        if name in coding:
            row["coding_share_of_reading"] = round(coding[name] / reading, 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
