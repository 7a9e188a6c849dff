"""Many sessions on a KV budget for a few, against the same sessions one after the other.

    python benchmarks/serving.py [--sessions 50] [--fitting 5] [--turns 3] [--tokens 600]
        [--policy none --policy keydiff ...] [--budget 256]

Sessions are life-logs with questions. In the same run a `larder serve` in its own process answers
over HTTP with streaming: first each session alone, its turns in order; then, with a byte budget
that holds `--fitting` of the sessions under the first policy, all of them at once, one client each
that sends its next turn when the last one is answered. Greedy answers must equal those of the
session alone, token for token, up to the first token at which the two best logits, recomputed here,
differ by less than 1e-3. Meanwhile `/metrics` is polled for the held bytes.

`none` keeps everything. Every policy gets the same bytes. One JSONL line per policy and mode in
results/serving.jsonl; the exit status is 1 if an answer differs or the budget was exceeded.
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

from larder.core import Conversation
from larder.engine import Engine
from larder.evaluation import exact_match
from larder.session import TokenizerAdapter
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
    """Session with its conversation and questions, one per turn."""

    name: str
    conversation: Conversation
    turns: int
    new_tokens: int

    def run(self, server: Server) -> list[StreamedAnswer]:
        """Send the turns, each after the previous one was answered."""
        messages = [{"role": m.role, "content": m.content} for m in self.conversation.messages]
        answers: list[StreamedAnswer] = []
        for question in self.conversation.questions[: self.turns]:
            messages.append({"role": "user", "content": question.question})
            body = {"messages": messages, "session_id": self.name, "max_tokens": self.new_tokens}
            answers.append(server.chat({**body, "model": "seed", "temperature": 0}))
            if answers[-1].error:
                raise RuntimeError(f"{self.name} was refused: {answers[-1].error}")
            messages.append({"role": "assistant", "content": answers[-1].text})
        return answers

    def accuracy(self, answers: Sequence[StreamedAnswer]) -> float:
        """Share of answers that are correct according to the life-log."""
        questions = self.conversation.questions[: self.turns]
        pairs = zip(answers, questions, strict=True)
        return float(np.mean([exact_match(one.text, question.answer) for one, question in pairs]))


@dataclass
class MetricsPoller:
    """Poller of a server's metrics, until it is stopped.

    `most` is the maximum of the bytes on the device, `over` the number of polls above the budget.
    """

    server: Server
    most: float = 0.0
    over: int = 0
    looks: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.wait(SCRAPE_SECONDS):
            self.read_metrics()

    def read_metrics(self) -> dict[str, float]:
        """Current metrics."""
        metrics = self.server.metrics()
        self.looks += 1
        self.most = max(self.most, metrics[DEVICE], metrics[PEAK])
        self.over += self.most > metrics.get(BUDGET, float("inf")) or metrics[VIOLATIONS] > 0
        return metrics


@dataclass
class ServingRun:
    """Results of serving all sessions in one mode."""

    answers: list[list[StreamedAnswer]]
    exported: list[bytes]
    seconds: float
    poller: MetricsPoller
    numbers: dict[str, float]

    def figures(self) -> dict[str, Any]:
        """Throughput and latency."""
        every = [one for session in self.answers for one in session]
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
            **{name: _quantiles(times) for name, times in waits.items()},
        }


def main() -> int:
    options = _options()
    sources = TaskSources(
        TokenizerAdapter(Engine.load("seed", policy="full").loaded.tokenizer).count_tokens
    )
    task = parse_task(options.task or f"lifelog(questions={options.turns})")
    conversations = [
        task.make(number, options.tokens, sources) for number in range(options.sessions)
    ]
    sessions = [
        ScriptedSession(f"n{n}", each, options.turns, options.new_tokens)
        for n, each in enumerate(conversations)
    ]
    budget: int | None = None
    failed = 0
    for policy in options.policy or ["none"]:
        budget, rows, wrong = compared(policy, sessions, budget, options)
        write(options.out, rows)
        failed += wrong
    return 1 if failed else 0


def compared(
    policy: str,
    sessions: Sequence[ScriptedSession],
    budget: int | None,
    options: argparse.Namespace,
) -> tuple[int, list[dict[str, Any]], int]:
    """Measure one policy; return its byte budget, its rows, and the number of failures."""
    spelling = EVERYTHING.get(policy, policy)
    flags = ["--policy", spelling]
    flags += [] if spelling == "full" else ["--budget", options.budget]
    alone = one_by_one(sessions, flags)
    largest = int(alone.numbers[PEAK])
    budget = budget or options.fitting * largest
    concurrent = at_once(sessions, [*flags, "--kv-budget", f"{-(-budget // 1024)}KiB"])
    sizes = {} if spelling == "full" else {"budget": options.budget}
    differences = _differences(Engine.load("seed", policy=spelling, **sizes), alone, concurrent)
    common = {"policy": policy, "sessions": len(sessions), "turns": options.turns}
    common |= {"tokens": options.tokens, "budget_bytes": budget, "session_bytes": largest}
    quicker = concurrent.figures()["tokens_per_second"] / alone.figures()["tokens_per_second"]
    outcome = differences | {
        "most_bytes": int(concurrent.poller.most),
        "looks": concurrent.poller.looks,
        "over_budget": concurrent.poller.over,
        "violations": int(concurrent.numbers[VIOLATIONS]),
        "steps": int(concurrent.numbers["larder_decode_steps_total"]),
        "moves": {
            name: n for name, n in concurrent.numbers.items() if name.startswith("larder_kv_")
        },
        "throughput": quicker,
    }
    right = {
        "right": float(
            np.mean([t.accuracy(h) for t, h in zip(sessions, concurrent.answers, strict=True)])
        )
    }
    rows = [
        common | {"way": "one by one"} | alone.figures() | {"environment": environment()},
        common
        | {"way": "at once"}
        | concurrent.figures()
        | outcome
        | right
        | {"environment": environment()},
    ]
    _print(rows)
    return budget, rows, outcome["different"] + outcome["over_budget"]


def one_by_one(sessions: Sequence[ScriptedSession], options: Sequence[str]) -> ServingRun:
    """Serve each session alone; it is removed before the next one starts."""
    with tempfile.TemporaryDirectory() as home:
        with run_server(Path(home), [*options, "--kv-budget", AMPLE]) as server:
            answers, exported, seconds = [], [], 0.0
            sessions[0].run(server)  # warm-up
            server.ask("DELETE", session_path(sessions[0].name))
            for session in sessions:
                started = time.perf_counter()
                answers.append(session.run(server))
                seconds += time.perf_counter() - started
                exported.append(server.ask("POST", session_path(session.name, "export")).body)
                server.ask("DELETE", session_path(session.name))
            poller = MetricsPoller(server)
            return ServingRun(answers, exported, seconds, poller, poller.read_metrics())


def at_once(sessions: Sequence[ScriptedSession], options: Sequence[str]) -> ServingRun:
    """Serve all sessions at the same time."""
    with tempfile.TemporaryDirectory() as home, run_server(Path(home), options) as server:
        ScriptedSession("first", sessions[0].conversation, 1, 1).run(server)
        server.ask("DELETE", session_path("first"))
        poller = MetricsPoller(server)
        thread = threading.Thread(target=poller.run)
        thread.start()
        try:
            started = time.perf_counter()
            with ThreadPoolExecutor(len(sessions)) as pool:
                answers = list(pool.map(partial(_run_session, server), sessions))
            seconds = time.perf_counter() - started
        finally:
            poller.ended.set()
            thread.join()
        numbers = poller.read_metrics()
        exported = [
            server.ask("POST", session_path(session.name, "export")).body for session in sessions
        ]
        return ServingRun(answers, exported, seconds, poller, numbers)


def _run_session(server: Server, session: ScriptedSession) -> list[StreamedAnswer]:
    return session.run(server)


def _differences(engine: Engine, alone: ServingRun, concurrent: ServingRun) -> dict[str, Any]:
    """Number of sessions that diverged, and whether rounding explains it."""
    pairs = zip(alone.exported, concurrent.exported, strict=True)
    found = [
        first_divergence(engine, exported_turns(one), exported_turns(other)) for one, other in pairs
    ]
    divergences = [each for each in found if each is not None]
    return {
        "equal": len(found) - len(divergences),
        "parted": len(divergences),
        "different": sum(not each.is_close for each in divergences),
        "gaps": [each.gap for each in divergences],
    }


def _between(answers: StreamedAnswer) -> float:
    """Mean seconds between two tokens of an answer."""
    return (answers.times[-1] - answers.times[0]) / (answers.tokens - 1)


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
    last = rows[-1]
    print(
        f"{last['policy']:12} {last['equal']} of {last['sessions']} sessions equal, "
        f"{last['parted']} diverged, {last['different']} of them beyond rounding; at most "
        f"{last['most_bytes']} of {last['budget_bytes']} bytes in {last['looks']} polls, "
        f"{last['violations']} violations; throughput {last['throughput']:.2f}x",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append", help="may be given several times")
    parser.add_argument("--budget", default="256", help="budget of policies that evict")
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--fitting", type=int, default=5, help="sessions that the budget holds")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--task", help="task of larder bench instead of life-logs")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
