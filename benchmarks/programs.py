"""Agent runs with tool calls: times to live and program-first order against plain LRU.

    python benchmarks/programs.py [--programs 12] [--seeds 1] [--device-bytes 2000000]

A trace of programs, each a conversation of a few turns with a tool call after each, is played on
an engine core whose device holds the caches of a few of them; what leaves is read again. Time is
virtual: a prompt's token takes 2 ms, a decode step 30 ms, so that figures do not depend on the
machine. Printed, and written to results/programs.jsonl, are the mean time from a program's first
request to its last answer, without its tools' own time, and the share of its prompt tokens that
were computed again, for each eviction policy and order of requests.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from _timing import environment, write
from _virtual_server import Answer, SlowHostRates, VirtualServer, text_of, user

from larder.engine import Engine
from larder.server import ChatMessage, Request, SchedulingPolicy
from larder.store import ByteBudgets, Tier
from larder_bench.random_models import open_model

OUT = Path("results/programs.jsonl")
# By tool: share of calls, median seconds, standard deviation of their logarithm, words returned.
TOOLS = {"read": (0.5, 0.4, 0.3, 60), "test": (0.4, 6.0, 0.4, 40), "person": (0.1, 90.0, 0.5, 20)}
TENANT, FIRST_WORDS = "agents", 200
HOST_BYTES = 4_000_000  # for transcripts


@dataclass
class Program:
    """Agent run: its calls in order, and how far it has come.

    Args:
        calls: tool, seconds and returned words of each call.
        due: time of the next request; infinite while one is answered.
    """

    name: str
    start: float
    calls: list[tuple[str, float, int]]
    due: float = 0.0
    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    answer: Answer | None = None
    turn: int = 0
    end: float = 0.0
    recomputed: int = 0
    prompt: int = 0

    @property
    def seconds(self) -> float:
        """Time to completion, without tools."""
        return self.end - self.start - sum(seconds for _, seconds, _ in self.calls)


def programs(count: int, seed: int) -> list[Program]:
    """Programs of a seed, by arrival."""
    random, found, time = Random(seed), list[Program](), 1e9
    for number in range(count):
        time += random.expovariate(1.0)
        names = random.choices(list(TOOLS), [tool[0] for tool in TOOLS.values()], k=5)
        calls = [
            (name, random.lognormvariate(math.log(TOOLS[name][1]), TOOLS[name][2]), TOOLS[name][3])
            for name in names
        ]
        found.append(Program(f"p{seed}-{number}", time, calls, time))
    return found


def replay(server: VirtualServer, trace: Sequence[Program]) -> None:
    """Replay a trace to its end."""
    clock = server.clock
    for program in trace:
        program.messages = [user(text_of(program.name, FIRST_WORDS))]
    while any(not program.end for program in trace):
        for program in trace:
            if program.due <= clock.now:
                _ask(server, program)
            elif program.answer is not None and program.answer.report is not None:
                _take(program, clock.now)
        if not server.step() and all(program.answer is None for program in trace):
            clock.now = max(clock.now, min(program.due for program in trace))


def _ask(server: VirtualServer, program: Program) -> None:
    tool = program.calls[program.turn][0] if program.turn < len(program.calls) else ""
    request = Request(TENANT, tuple(program.messages), program.name, max_new_tokens=4, tool=tool)
    program.due, program.answer = math.inf, server.submit(request)


def _take(program: Program, now: float) -> None:
    """Take an answer, and call the next tool."""
    answer = program.answer
    assert answer is not None and answer.report is not None
    program.recomputed += answer.report.recomputed_tokens
    program.prompt += answer.report.prompt_tokens
    program.answer = None
    if program.turn == len(program.calls):
        program.end = now
        return
    tool, seconds, words = program.calls[program.turn]
    program.turn += 1
    result = user(text_of(f"{program.name} {tool} {program.turn}", words))
    program.messages += [ChatMessage("assistant", answer.text), result]
    program.due = now + seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Programs first against plain LRU.")
    parser.add_argument("--programs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device-bytes", type=int, default=2_000_000)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    engine = Engine(open_model("random:qwen3-tiny"), policy="full")
    budgets = ByteBudgets({Tier.DEVICE: options.device_bytes, Tier.HOST: HOST_BYTES})
    rows = list[dict[str, Any]]()
    for eviction, order in product(("lru", "continuum"), SchedulingPolicy):
        played = list[Program]()
        for seed in range(options.seeds):
            trace = programs(options.programs, seed)
            server = VirtualServer(budgets, eviction, order, engine=engine)
            server.core.tiers.rates = SlowHostRates()
            replay(server, trace)
            played += trace
        seconds = sorted(program.seconds for program in played)
        again = sum(each.recomputed for each in played) / sum(each.prompt for each in played)
        mean = sum(seconds) / len(seconds)
        rows.append({"eviction": eviction, "order": order.value, "seconds": mean, "again": again})
        print(f"{eviction:10} {order.value:13} {mean:6.1f} s, {again:.2f} read again", flush=True)
    write(options.out, [row | {"environment": environment()} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
