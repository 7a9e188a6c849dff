"""Decode steps over a low-rank state (LESS), against steps over as many entries without it.

Steps of both alternate in one process; the ratio of their CPU times is printed.

    larder train less --model smollm2 --corpus FOLDER
    python benchmarks/less_step.py --model smollm2
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from larder.cache import SequenceCache
from larder.core import Mode
from larder.engine import Engine
from larder.models import BatchSegment
from larder.prefill import PeakMemoryMeter
from larder.session import Policy, build_caches, entries_per_head

LESS = "whole() > protect(sinks=0, recent=0.5) > keydiff() > uniform() > less()"
PLAIN = "whole() > protect(sinks=0, recent=0.5) > keydiff() > uniform()"


def built(engine: Engine, sentence: str, tokens: int, ids: tuple[int, ...]) -> SequenceCache:
    policy = Policy.parse(sentence).with_sizes(tokens, None)
    return build_caches(engine.runtime, policy, ids, [{}], PeakMemoryMeter()).activate(0)


def step_seconds(engine: Engine, cache: SequenceCache, token: int) -> float:
    started = time.process_time()
    engine.runtime.decoder.forward_logits([BatchSegment(cache, (token,))], Mode.APPEND, [0])
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    engine = Engine.load(args.model, policy="full", dtype=args.dtype)
    ids = tuple(3 + number % 1000 for number in range(args.context))
    policy = Policy.parse(LESS).with_sizes(args.tokens, None)
    held = entries_per_head(policy, engine.runtime.decoder.spec)
    pair = built(engine, LESS, args.tokens, ids), built(engine, PLAIN, held, ids)
    found = [[step_seconds(engine, cache, 5 + n) for cache in pair] for n in range(args.steps)]
    own, plain = (median(times) for times in zip(*found[2:], strict=True))
    print(f"{args.model}, {args.dtype}, {held} entries per kv head and a state of the others")
    print(f"step with the state {1e3 * own:.1f} ms, without {1e3 * plain:.1f} ms of CPU time")
    print(f"the state takes {100 * (own / plain - 1):.1f} % of a step")


if __name__ == "__main__":
    main()
