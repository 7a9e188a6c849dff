"""CPU time that learned methods take of a decode step, and of reading a text.

Each policy has a control without weights that holds as many entries. Steps over both caches take
turns in one process, and texts are read by both in turn; printed are the median CPU time of a step,
its ratio to that of the control, the ratio of the medians of reading, and the weights that a gate
multiplies a written token with, relative to those of the model.

    larder train kvzap_mlp --model smollm2 --corpus FOLDER
    python benchmarks/learned_step.py --model smollm2 --policies kvzap,kvzap_mlp
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from learned_scores import POLICIES

from larder.cache import SequenceCache
from larder.core import Mode
from larder.engine import Engine
from larder.models import BatchSegment, load_learned
from larder.policy import GateProvider, column_providers
from larder.prefill import PeakMemoryMeter
from larder.session import Policy, build_caches, common_prompts, entries_per_head

RECENT = "whole() > protect(sinks=0, recent=0.5) > keydiff() > uniform()"
CONTROLS = {"global": "whole() > random() > global()", "uniform": "whole() > random() > uniform()"}
# Policies without a gate, and what they are compared with.
OTHERS = {
    "less": (f"{RECENT} > less()", RECENT),
    "lococo": (f"{RECENT} > lococo()", RECENT),
    "q_filters": (POLICIES["q_filters"], CONTROLS["uniform"]),
    "lookahead_kv": ("whole() > lookahead_kv() > uniform()", CONTROLS["uniform"]),
}
GATES = ("kvzap", "kvzap_mlp", "fast_kvzip", "locret", "trim", "global_retention", "attention_gate")


def pair(name: str) -> tuple[str, str]:
    """Sentences of a policy and of its control."""
    if name in OTHERS:
        return OTHERS[name]
    return POLICIES[name], CONTROLS["global" if "global()" in POLICIES[name] else "uniform"]


def built(engine: Engine, policy: Policy, ids: tuple[int, ...]) -> tuple[SequenceCache, float]:
    """Cache of a text, and the CPU seconds that reading it took."""
    started = time.process_time()
    prompts = common_prompts(engine.tokenizer)
    memory = build_caches(engine.runtime, policy, ids, [prompts], PeakMemoryMeter())
    return memory.activate(0), time.process_time() - started


def step_seconds(engine: Engine, cache: SequenceCache, token: int) -> float:
    started = time.process_time()
    engine.runtime.decoder.forward_logits([BatchSegment(cache, (token,))], Mode.APPEND, [0])
    return time.process_time() - started


def gate_share(engine: Engine, policy: Policy) -> float:
    """Weights of a policy's gates, relative to those of the model; 0 without gates."""
    spec, module = engine.runtime.decoder.spec, engine.runtime.decoder.module
    whole = sum(weight.numel() for weight in module.parameters() if weight.dim() > 1)
    gates = column_providers(policy.planner.ledger.columns, GateProvider)
    layers = [
        layer for name, gate in gates.items() for layer in load_learned(spec, name, gate).layers
    ]
    return (
        sum(each.numel() for layer in layers for each in layer.values() if each.dim() > 1) / whole
    )


def measure(engine: Engine, name: str, args: argparse.Namespace) -> dict[str, object]:
    """Ratios of one policy to its control."""
    ids = tuple(3 + number * 7919 % 1000 for number in range(args.context))
    own, control = (Policy.parse(sentence) for sentence in pair(name))
    policy = own.with_sizes(args.tokens, None)
    held = entries_per_head(policy, engine.runtime.decoder.spec)
    policies = policy, control.with_sizes(held, None)
    reads = [[built(engine, each, ids) for each in policies] for _ in range(args.reads + 1)]
    caches = [cache for cache, _ in reads[-1]]
    steps = [[step_seconds(engine, each, 5 + n) for each in caches] for n in range(args.steps + 2)]
    step, plain = (median(times) for times in zip(*steps[2:], strict=True))
    reading = [[seconds for _, seconds in row] for row in reads[1:]]
    read, read_plain = (median(times) for times in zip(*reading, strict=True))
    return {
        "policy": name,
        "step_ms": round(1e3 * step, 2),
        "step_ratio": round(step / plain, 3),
        "reading_ratio": round(read / read_plain, 3),
        "gate_share": round(gate_share(engine, policy), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--reads", type=int, default=3)
    parser.add_argument("--policies", default=",".join((*GATES, *OTHERS)))
    args = parser.parse_args()
    engine = Engine.load(args.model, policy="full", dtype=args.dtype)
    for name in args.policies.split(","):
        print(json.dumps(measure(engine, name, args)), flush=True)


if __name__ == "__main__":
    main()
