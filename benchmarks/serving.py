"""Many sessions on a KV budget for a few, against the same sessions one after the other.

    python benchmarks/serving.py [--sessions 50] [--fitting 5] [--turns 3] [--tokens 600]
        [--policy none --policy keydiff ...] [--budget 256]

Sessions are life-logs with questions. In the same run a `larder serve` of its own process answers,
over HTTP and streaming: first each session alone, its turns in order and nobody else there; then,
on a budget of bytes that holds `--fitting` of the sessions under the first policy, all of them at
once, a client each that asks its next turn when the last one is answered. Greedy answers must be
those of the session alone, token for token, up to a first place where the two best logits, computed
anew here, are closer than 1e-3. All the while `/metrics` is asked for what is held.

`none` keeps everything. Every policy gets the same bytes. One JSONL line per policy and way in
results/serving.jsonl; exit status 1 where an answer differs or the budget was exceeded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _answer_divergence import exported_turns, first_divergence
from _server import Server, StreamedAnswer, run_server, session_path
from _timing import environment, write

from larder.core.conversation import Conversation
from larder.engine.engine import Engine
from larder.evaluation.answer_metrics import exact_match
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import parse_task

OUT = Path("results/serving.jsonl")
EVERYTHING = {"none": "full"}
AMPLE = "64GiB"
SCRAPE_SECONDS = 0.05
DEVICE, BUDGET = 'larder_tier_bytes{tier="device"}', 'larder_budget_bytes{tier="device"}'
PEAK, VIOLATIONS = 'larder_peak_bytes{tier="device"}', "larder_budget_violations_total"


@dataclass(frozen=True)
class ScriptedSession:
    """A session: what is told in it, and what is asked turn by turn."""

    name: str
    conversation: Conversation
    turns: int
    new_tokens: int

    def hold(self, server: Server) -> list[StreamedAnswer]:
        """Ask turn by turn, each when the one before is answered."""
        told = [{"role": m.role, "content": m.content} for m in self.conversation.messages]
        heard: list[StreamedAnswer] = []
        for question in self.conversation.questions[: self.turns]:
            told.append({"role": "user", "content": question.question})
            body = {"messages": told, "session_id": self.name, "max_tokens": self.new_tokens}
            heard.append(server.chat({**body, "model": "seed", "temperature": 0}))
            if heard[-1].error:
                raise RuntimeError(f"{self.name} was refused: {heard[-1].error}")
            told.append({"role": "assistant", "content": heard[-1].text})
        return heard

    def right(self, heard: Sequence[StreamedAnswer]) -> float:
        """The share of answers that are what the life-log says."""
        asked = self.conversation.questions[: self.turns]
        pairs = zip(heard, asked, strict=True)
        return float(np.mean([exact_match(one.text, question.answer) for one, question in pairs]))


@dataclass
class MetricsPoller:
    """Asks a server for its numbers until it is told to stop.

    `most` is the most bytes seen on the device, `over` how often they were above the budget.
    """

    server: Server
    most: float = 0.0
    over: int = 0
    looks: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.wait(SCRAPE_SECONDS):
            self.look()

    def look(self) -> dict[str, float]:
        """The numbers now."""
        told = self.server.metrics()
        self.looks += 1
        self.most = max(self.most, told[DEVICE], told[PEAK])
        self.over += self.most > told.get(BUDGET, float("inf")) or told[VIOLATIONS] > 0
        return told


@dataclass
class ServingRun:
    """All sessions served one way."""

    heard: list[list[StreamedAnswer]]
    exported: list[bytes]
    seconds: float
    watcher: MetricsPoller
    numbers: dict[str, float]

    def figures(self) -> dict[str, Any]:
        """Throughput and latency."""
        every = [one for own in self.heard for one in own]
        between = [_between(one) for one in every if one.tokens > 1 and len(one.times) > 1]
        new = sum(one.tokens for one in every)
        waits = {
            "first_token": [one.times[0] if one.times else one.seconds for one in every],
            "per_token": between or [0.0],
            "end_to_end": [one.seconds for one in every],
        }
        return {
            "requests": len(every),
            "seconds": self.seconds,
            "new_tokens": new,
            "tokens_per_second": new / self.seconds,
            "requests_per_second": len(every) / self.seconds,
            **{name: _quantiles(told) for name, told in waits.items()},
        }


def main() -> int:
    given = _given()
    sources = TaskSources(
        TokenizerAdapter(Engine.load("seed", policy="full").loaded.tokenizer).count_tokens
    )
    task = parse_task(given.task or f"lifelog(questions={given.turns})")
    made = [task.make(number, given.tokens, sources) for number in range(given.sessions)]
    talks = [
        ScriptedSession(f"n{n}", each, given.turns, given.new_tokens) for n, each in enumerate(made)
    ]
    budget: int | None = None
    failed = 0
    for policy in given.policy or ["none"]:
        budget, rows, wrong = compared(policy, talks, budget, given)
        write(given.out, rows)
        failed += wrong
    return 1 if failed else 0


def compared(
    policy: str, talks: Sequence[ScriptedSession], budget: int | None, given: argparse.Namespace
) -> tuple[int, list[dict[str, Any]], int]:
    """One policy: the bytes that it got, its rows, and what was wrong."""
    spelling = EVERYTHING.get(policy, policy)
    options = ["--policy", spelling]
    options += [] if spelling == "full" else ["--budget", given.budget]
    alone = one_by_one(talks, options)
    largest = int(alone.numbers[PEAK])
    budget = budget or given.fitting * largest
    crowd = at_once(talks, [*options, "--kv-budget", f"{-(-budget // 1024)}KiB"])
    sizes = {} if spelling == "full" else {"budget": given.budget}
    differences = _differences(Engine.load("seed", policy=spelling, **sizes), alone, crowd)
    told = {"policy": policy, "sessions": len(talks), "turns": given.turns, "tokens": given.tokens}
    told |= {"budget_bytes": budget, "session_bytes": largest}
    quicker = crowd.figures()["tokens_per_second"] / alone.figures()["tokens_per_second"]
    outcome = differences | {
        "most_bytes": int(crowd.watcher.most),
        "looks": crowd.watcher.looks,
        "over_budget": crowd.watcher.over,
        "violations": int(crowd.numbers[VIOLATIONS]),
        "steps": int(crowd.numbers["larder_decode_steps_total"]),
        "moves": {name: n for name, n in crowd.numbers.items() if name.startswith("larder_kv_")},
        "throughput": quicker,
    }
    right = {"right": float(np.mean([t.right(h) for t, h in zip(talks, crowd.heard, strict=True)]))}
    rows = [
        told | {"way": "one by one"} | alone.figures() | {"environment": environment()},
        told
        | {"way": "at once"}
        | crowd.figures()
        | outcome
        | right
        | {"environment": environment()},
    ]
    _print(rows)
    return budget, rows, outcome["different"] + outcome["over_budget"]


def one_by_one(talks: Sequence[ScriptedSession], options: Sequence[str]) -> ServingRun:
    """Each session alone; it is removed before the next one comes."""
    with tempfile.TemporaryDirectory() as home:
        with run_server(Path(home), [*options, "--kv-budget", AMPLE]) as server:
            heard, exported, seconds = [], [], 0.0
            talks[0].hold(server)  # what is compiled or read once is not measured
            server.ask("DELETE", session_path(talks[0].name))
            for talk in talks:
                begun = time.perf_counter()
                heard.append(talk.hold(server))
                seconds += time.perf_counter() - begun
                exported.append(server.ask("POST", session_path(talk.name, "export")).body)
                server.ask("DELETE", session_path(talk.name))
            watcher = MetricsPoller(server)
            return ServingRun(heard, exported, seconds, watcher, watcher.look())


def at_once(talks: Sequence[ScriptedSession], options: Sequence[str]) -> ServingRun:
    """All sessions at the same time."""
    with tempfile.TemporaryDirectory() as home, run_server(Path(home), options) as server:
        ScriptedSession("first", talks[0].conversation, 1, 1).hold(server)
        server.ask("DELETE", session_path("first"))
        watcher = MetricsPoller(server)
        watching = threading.Thread(target=watcher.run)
        watching.start()
        try:
            begun = time.perf_counter()
            with ThreadPoolExecutor(len(talks)) as pool:
                heard = list(pool.map(partial(_held, server), talks))
            seconds = time.perf_counter() - begun
        finally:
            watcher.ended.set()
            watching.join()
        numbers = watcher.look()
        exported = [server.ask("POST", session_path(talk.name, "export")).body for talk in talks]
        return ServingRun(heard, exported, seconds, watcher, numbers)


def _held(server: Server, talk: ScriptedSession) -> list[StreamedAnswer]:
    return talk.hold(server)


def _differences(engine: Engine, alone: ServingRun, crowd: ServingRun) -> dict[str, Any]:
    """How many sessions went another way, and whether the model hardly cared there."""
    pairs = zip(alone.exported, crowd.exported, strict=True)
    found = [
        first_divergence(engine, exported_turns(one), exported_turns(other)) for one, other in pairs
    ]
    partings = [each for each in found if each is not None]
    return {
        "equal": len(found) - len(partings),
        "parted": len(partings),
        "different": sum(not each.is_close for each in partings),
        "gaps": [each.gap for each in partings],
    }


def _between(heard: StreamedAnswer) -> float:
    """Seconds between two tokens, on average over an answer."""
    return (heard.times[-1] - heard.times[0]) / (heard.tokens - 1)


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50": float(np.quantile(seconds, 0.5)), "p95": float(np.quantile(seconds, 0.95))}


def _print(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        waits = " ".join(
            f"{name} {row[name]['p50']:.3f}/{row[name]['p95']:.3f} s"
            for name in ("first_token", "per_token", "end_to_end")
        )
        rate = f"{row['tokens_per_second']:8.1f} tokens/s"
        print(f"{row['policy']:12} {row['way']:10} {rate}  {waits}", flush=True)
    told = rows[-1]
    print(
        f"{told['policy']:12} {told['equal']} of {told['sessions']} sessions equal, "
        f"{told['parted']} parted, {told['different']} of them where it matters; at most "
        f"{told['most_bytes']} of {told['budget_bytes']} bytes in {told['looks']} looks, "
        f"{told['violations']} violations; throughput {told['throughput']:.2f}x",
        flush=True,
    )


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append", help="may be given several times")
    parser.add_argument("--budget", default="256", help="of policies that drop")
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--fitting", type=int, default=5, help="sessions that the budget holds")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--task", help="instead of life-logs, as larder bench has it")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
