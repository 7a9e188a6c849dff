"""Agents that call tools: many short turns, pauses of very different lengths, long contexts.

No paper. Sizes are those that operators of such agents report: about forty turns a session, answers
of a few hundred tokens, more than nine tenths of every prompt seen before. Jobs arrive in bursts,
and each has one of a few system prompts. The duration of a pause depends on its tool and is not
known in advance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from larder.core import BadParameter
from larder_bench.traces._builder import TraceBuilder
from larder_bench.traces.base import Trace, Workload

PROMPTS = (6000, 3500, 9000, 2000)
PROMPT_SHARES = (0.5, 0.25, 0.15, 0.1)
# By tool: share of calls, median seconds, standard deviation of their logarithm, returned tokens.
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
        turns: median number of turns of a job.
        jobs_per_hour: mean arrival rate, over bursts and pauses.
        burst: number of jobs that arrive together.
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
        random, builder = np.random.default_rng((seed, 1)), TraceBuilder(self)
        prompts = [builder.prompt(tokens) for tokens in PROMPTS]
        time = 0.0
        while not builder.has_events(events, time):
            time += random.exponential(3600 * self.burst / self.jobs_per_hour)
            for _ in range(1 + random.poisson(self.burst - 1)):
                prompt = prompts[random.choice(len(prompts), p=PROMPT_SHARES)]
                self._job(builder, prompt, time + random.exponential(20.0), random)
        return builder.trace(events)

    def _job(
        self, builder: TraceBuilder, prompt: int, time: float, random: np.random.Generator
    ) -> None:
        session = builder.begin_session(prompt)
        prompt_tokens = int(random.lognormal(np.log(800), 0.8))
        names, shares = list(TOOLS), [tool[0] for tool in TOOLS.values()]
        for _ in range(max(1, int(random.lognormal(np.log(self.turns), 0.5)))):
            name = names[random.choice(len(names), p=shares)]
            _, median, spread, tokens = TOOLS[name]
            over = builder.turn(
                session, time, prompt_tokens, 20 + int(random.exponential(280)), name
            )
            time = over + random.lognormal(np.log(median), spread)
            prompt_tokens = 10 + int(random.lognormal(np.log(tokens), 0.8))


Part = Agents
