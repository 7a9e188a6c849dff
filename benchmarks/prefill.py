"""Time of prefill in blocks under several policies, relative to the first of them.

    python benchmarks/prefill.py --model smollm2 --dtype bfloat16 --context 4096 --threads 1

Each policy reads random tokens in blocks and keeps a quarter of them. Policies take turns, so that
a busy machine slows all of them alike; the median CPU time of each is printed with its quartiles,
its ratio to the first policy, and the share that the measurement of memory takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from _timing import quartiles

from larder import Policy
from larder.cache import SequenceCache
from larder.models import Decoder, load
from larder.prefill import PeakMemoryMeter
from larder.session import Embedder, ModelRuntime, TokenizerAdapter, build_caches

POLICIES = ("keydiff", "full", "h2o_blockwise", "d2o_blockwise", "roco")


class TimedMeter(PeakMemoryMeter):
    """Meter that adds up the CPU seconds of its observations."""

    seconds = 0.0

    def observe(self, caches: Sequence[SequenceCache], passing_bytes: int) -> None:
        started = time.thread_time()
        super().observe(caches, passing_bytes)
        self.seconds += time.thread_time() - started


def _no_embedder(name: str) -> Embedder:
    raise ValueError(f"The policies here form no episodes, but {name} was asked for.")


def prefill_seconds(decoder: Decoder, policy: Policy, ids: tuple[int, ...]) -> tuple[float, float]:
    """CPU seconds of a prefill, and those of its meter."""
    tokenizer = object.__new__(TokenizerAdapter)  # ids are given
    runtime = ModelRuntime(decoder, tokenizer, _no_embedder, lambda names: {})
    meter, started = TimedMeter(), time.process_time()
    with torch.no_grad():
        build_caches(runtime, policy, ids, [{}], meter)
    return time.process_time() - started, meter.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of prefill in blocks under policies.")
    parser.add_argument("--model", default="seed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    decoder = load(chosen.model, dtype=chosen.dtype).decoder
    ids = tuple(torch.randint(3, decoder.vocab_size, (chosen.context,)).tolist())
    policies = {}
    for name in chosen.policies:
        policy = Policy.parse(name)
        if name != "full":
            policy = policy.with_sizes(chosen.context // 4, chosen.block)
        policies[name] = policy
    seconds: dict[str, list[float]] = {name: [] for name in policies}
    shares: dict[str, list[float]] = {name: [] for name in policies}
    for turn in range(chosen.rounds + 1):
        for name, policy in policies.items():
            whole, of_meter = prefill_seconds(decoder, policy, ids)
            if turn:  # the first warms up
                seconds[name].append(whole)
                shares[name].append(of_meter / whole)
    base = statistics.median(seconds[chosen.policies[0]])
    for name, own in seconds.items():
        meter = 100 * statistics.median(shares[name])
        print(f"{name:16} {quartiles(own, base)} {chosen.policies[0]}, meter {meter:.2f} %")


if __name__ == "__main__":
    main()
