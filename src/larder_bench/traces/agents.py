"""Agents that call tools: many short turns, pauses of very different lengths, long contexts.

No paper. Sizes are those that operators of such agents report: some forty turns a session, answers
of a few hundred tokens, more than nine tenths of every prompt known from before. Jobs come in
bursts, and each has one of a few system prompts. What a pause takes depends on its tool; how long,
nobody knows before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from larder.core.errors import BadParameter
from larder_bench.traces._builder import TraceBuilder
from larder_bench.traces.base import Trace, Workload

PROMPTS = (6000, 3500, 9000, 2000)
PROMPT_SHARES = (0.5, 0.25, 0.15, 0.1)
# Of each tool: how often it is called, median seconds, spread of their logarithm, tokens returned.
TOOLS = {
    "read": (0.45, 0.3, 0.6, 900),
    "search": (0.25, 3.0, 0.7, 1400),
    "test": (0.22, 45.0, 0.9, 700),
    "approval": (0.08, 900.0, 1.2, 60),
}


@dataclass(frozen=True)
class Agents(Workload):
    """One agent per session, in a loop of model and tool.

    Args:
        turns: of a job, as a median.
        jobs_per_hour: that come, as a mean over bursts and the quiet between.
        burst: jobs that come together.
    """

    turns: int = 40
    jobs_per_hour: float = 150.0
    burst: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("turns", "jobs_per_hour", "burst"):
            if not getattr(self, name) > 0:
                raise BadParameter(f"agents.{name} must be more than 0, got {getattr(self, name)}.")

    def make(self, seed: int, events: int) -> Trace:
        random, diary = np.random.default_rng((seed, 1)), TraceBuilder(self)
        prompts = [diary.prompt(tokens) for tokens in PROMPTS]
        time = 0.0
        while not diary.holds(events, time):
            time += random.exponential(3600 * self.burst / self.jobs_per_hour)
            for _ in range(1 + random.poisson(self.burst - 1)):
                prompt = prompts[random.choice(len(prompts), p=PROMPT_SHARES)]
                self._job(diary, prompt, time + random.exponential(20.0), random)
        return diary.trace(events)

    def _job(
        self, diary: TraceBuilder, prompt: int, time: float, random: np.random.Generator
    ) -> None:
        session = diary.begin(prompt)
        asked = int(random.lognormal(np.log(800), 0.8))
        names, shares = list(TOOLS), [tool[0] for tool in TOOLS.values()]
        for _ in range(max(1, int(random.lognormal(np.log(self.turns), 0.5)))):
            name = names[random.choice(len(names), p=shares)]
            _, median, spread, tokens = TOOLS[name]
            over = diary.turn(session, time, asked, 20 + int(random.exponential(280)), name)
            time = over + random.lognormal(np.log(median), spread)
            asked = 10 + int(random.lognormal(np.log(tokens), 0.8))


Part = Agents
