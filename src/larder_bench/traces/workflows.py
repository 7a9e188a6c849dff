"""Workflows of several agents that take turns, with hints about the next ones.

No paper. Each agent has a session and its own long system prompt, shared by all workflows. One step
is one turn of one agent, mostly of the next one in a fixed ring; sometimes work goes back by one.
After each step the workflow gives a hint in how many steps each of its agents is due.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from larder.core import BadParameter
from larder_bench.traces._builder import TraceBuilder, TraceSession
from larder_bench.traces.base import Trace, Workload

PROMPTS = (2500, 4000, 3000, 6000, 2000, 5000)
BACK = 0.15  # share of steps that go back by one agent
TOOL = "step"


@dataclass(frozen=True)
class Workflows(Workload):
    """Rings of agents.

    Args:
        agents: number of agents of a workflow, at most 6.
        rounds: median number of rounds through the ring.
        flows_per_hour: arrival rate of workflows.
        pause: median seconds between two steps.
    """

    agents: int = 5
    rounds: int = 8
    flows_per_hour: float = 60.0
    pause: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.agents <= len(PROMPTS):
            raise BadParameter(
                f"workflows.agents must be from 1 to {len(PROMPTS)}, got {self.agents}."
            )
        for name in ("rounds", "flows_per_hour", "pause"):
            if not getattr(self, name) > 0:
                value = getattr(self, name)
                raise BadParameter(f"workflows.{name} must be more than 0, got {value}.")

    def make(self, seed: int, events: int) -> Trace:
        random, builder = np.random.default_rng((seed, 2)), TraceBuilder(self)
        prompts = [builder.prompt(tokens) for tokens in PROMPTS[: self.agents]]
        time = 0.0
        while not builder.has_events(events, time):
            time += random.exponential(3600 / self.flows_per_hour)
            self._flow(builder, [builder.begin_session(prompt) for prompt in prompts], time, random)
        return builder.trace(events)

    def _flow(
        self,
        builder: TraceBuilder,
        ring: list[TraceSession],
        time: float,
        random: np.random.Generator,
    ) -> None:
        steps = max(1, int(random.lognormal(np.log(self.rounds), 0.4))) * len(ring)
        index = 0
        for step in range(steps):
            prompt_tokens = 50 + int(random.lognormal(np.log(600), 0.9))
            answer_tokens = 30 + int(random.exponential(400))
            over = builder.turn(ring[index], time, prompt_tokens, answer_tokens, TOOL)
            is_last = step == steps - 1
            due = (index + (-1 if random.random() < BACK else 1)) % len(ring)
            for number, session in enumerate(ring):
                left = 1 + (number - due) % len(ring)
                builder.hint(session, over, math.inf if is_last else float(left))
            index = due
            time = over + random.lognormal(np.log(self.pause), 1.0)


Part = Workflows
