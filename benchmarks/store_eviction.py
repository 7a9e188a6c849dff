"""Comparison of eviction policies on traces of agents, workflows and people.

    python benchmarks/store_eviction.py [--traces agents,chat] [--forms whole,parts]
        [--budgets 1/16,1/8,1/4,1/2] [--events 20000] [--seeds 3]
        [--rules 'lru();marconi(alpha=0.1)'] [--out results/store_eviction.jsonl]

A budget is a share of the bytes that a trace needs: with all of them, a policy that knows the
future never computes anything twice. Also compared are `clairvoyant`, which knows the future and
evicts what saves least per byte and second until its next read (`belady`: what is read last),
`marconi tuned`, with alpha from 0 to 2 chosen on the first tenth of the trace, and `bound`, an
upper bound. Nothing is timed: seconds are those of a device with 2e14 operations a second, in the
shape of Llama 3.1 8B.

One JSONL line per trace, seed, budget and rule; `larder plot FILE --figure eviction` draws them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from larder.core import build, parse, spell
from larder.store import EVICTIONS, EvictionPolicy, Marconi, SupersededOrder
from larder_bench.offline_optimum import Belady, Clairvoyant, FutureReads, ReuseIntervals
from larder_bench.results.environment import environment_row
from larder_bench.results.rows import Row, append_rows
from larder_bench.trace_replay import ReplayCounts, best_policy, replay_trace
from larder_bench.traces.base import TRACES, StateForm, Trace, Workload

TUNED = "marconi tuned"


@dataclass(frozen=True)
class EvictionCase:
    """Trace with its derived data."""

    workload: Workload
    seed: int
    trace: Trace
    held: ReuseIntervals
    foresight: FutureReads

    @staticmethod
    def of(workload: Workload, seed: int, events: int) -> EvictionCase:
        trace = workload.make(seed, events)
        return EvictionCase(workload, seed, trace, ReuseIntervals.of(trace), FutureReads.of(trace))

    def row(self, policy: str, spelling: str, budget: Fraction, fields: Row) -> Row:
        head: Row = {"schema": 1, "row": "eviction", "study": "store eviction"}
        return {
            **head,
            "model": self.workload.model.value,
            "task": f"{spell(self.workload).partition('(')[0]}, {self.workload.form.value}",
            "trace": spell(self.workload),
            "tokens": len(self.trace.events),
            "seed": self.seed,
            "policy": policy,
            "spelling": spelling,
            "budget": str(budget),
            "budget_bytes": int(self.held.needed_bytes() * budget),
            "needed_share": float(budget),
            **fields,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", default="agents,workflows,chat,mixed")
    parser.add_argument("--forms", default="whole,parts")
    parser.add_argument("--budgets", default="1/16,1/8,1/4,1/2")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", default="", help=f"separated by ;.  Default: all and {TUNED}")
    parser.add_argument("--out", type=Path, default=Path("results/store_eviction.jsonl"))
    options = parser.parse_args()
    environment = environment_row(1)
    append_rows(options.out, [environment])
    for name in options.traces.split(","):
        for form in map(StateForm, options.forms.split(",")):
            for seed in range(options.seeds):
                case = EvictionCase.of(TRACES.load(name)(form=form), seed, options.events)
                for budget in map(Fraction, options.budgets.split(",")):
                    for row in _rows(case, budget, options.rules):
                        append_rows(options.out, [row | {"environment": environment["id"]}])
                        _show(row)


def _rows(case: EvictionCase, budget: Fraction, rules: str) -> Iterator[Row]:
    size = int(case.held.needed_bytes() * budget)
    for policy, rule in _rules(case, size, rules):
        counts = replay_trace(case.trace, rule, size)
        yield case.row(policy, spell(rule), budget, asdict(counts))
    for policy, kind in (("belady", Belady), ("clairvoyant", Clairvoyant)):
        rule = kind(superseded=SupersededOrder.ALIKE)
        counts = replay_trace(case.trace, rule, size, case.foresight)
        yield case.row(policy, policy, budget, asdict(counts))
    yield case.row("bound", "bound", budget, _bound(case, size, counts))


def _rules(case: EvictionCase, size: int, spellings: str) -> Iterator[tuple[str, EvictionPolicy]]:
    if spellings:
        for rule in spellings.split(";"):
            if rule == TUNED:
                yield TUNED, best_policy(case.trace, Marconi().variants(), size)
                continue
            call = parse(rule, "rule")[0]
            yield rule, build(EVICTIONS.load(call.name), call.parameters)
        return
    for name in EVICTIONS.names():
        yield name, EVICTIONS.load(name)()
    yield TUNED, best_policy(case.trace, Marconi().variants(), size)


def _bound(case: EvictionCase, size: int, counts: ReplayCounts) -> Row:
    known = {name: value for name, value in asdict(counts).items() if name.startswith("known_")}
    prompts = {"prompt_tokens": counts.prompt_tokens, "prompt_seconds": counts.prompt_seconds}
    return {
        "hit_tokens": min(case.held.most_tokens(size), counts.known_tokens),
        "hit_seconds": min(case.held.most_seconds(size), counts.known_seconds),
        **known,
        **prompts,
    }


def _show(row: Row) -> None:
    print(
        f"{row['task']:18} seed {row['seed']}  {row['budget']:>5} "
        f"({row['budget_bytes'] / 2**30:6.1f} GiB)  {row['policy']:14} "
        f"tokens {row['hit_tokens'] / row['prompt_tokens']:.3f}  "
        f"seconds {row['hit_seconds'] / row['known_seconds']:.3f}  "
        f"evictions {row.get('evictions', 0):7}",
        flush=True,
    )


if __name__ == "__main__":
    main()
