"""Chats: people who talk for a while and come back after minutes, days, or never.

No paper. A conversation has a few visits of a few turns each. Turns are most of a minute apart,
visits minutes, hours or days. Some answers are regenerated, some texts are pasted in, a few
conversations are pinned. Sometimes a script sends a batch of prompts that are never repeated, which
must not evict everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from larder.core import BadParameter, require_at_least
from larder_bench.traces._builder import TraceBuilder
from larder_bench.traces.base import Trace, Workload

PROMPTS = (400, 1200, 2500, 700, 4000, 1500)
PROMPT_SHARES = (0.4, 0.2, 0.15, 0.1, 0.1, 0.05)
DAY = 86_400.0
# Gaps between visits: share, median seconds, standard deviation of their logarithm.
GAPS = ((0.4, 1200.0, 0.8), (0.35, 8 * 3600.0, 0.6), (0.25, 3 * DAY, 0.8))
PERSON = "person"


@dataclass(frozen=True)
class ChatWorkload(Workload):
    """Conversations and batches.

    Args:
        visits: mean number of visits of a conversation.
        turns: mean number of turns of a visit.
        talks_per_hour: arrival rate of conversations.
        pinned: share of conversations that are pinned for a day after their first visit.
        again: share of answers that are regenerated.
        batches_per_day: rate of batches of prompts that are never repeated.
        batch: number of prompts of a batch.
    """

    visits: float = 3.0
    turns: float = 5.0
    talks_per_hour: float = 60.0
    pinned: float = 0.02
    again: float = 0.04
    batches_per_day: float = 6.0
    batch: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, "chat", visits=self.visits, turns=self.turns)
        for name in ("pinned", "again"):
            if not 0 <= getattr(self, name) <= 1:
                value = getattr(self, name)
                raise BadParameter(f"chat.{name} must be from 0 to 1, got {value}.")
        if not (self.talks_per_hour > 0 and self.batches_per_day >= 0 and self.batch >= 0):
            raise BadParameter("chat must have talks_per_hour above 0, and no batch below 0.")

    def make(self, seed: int, events: int) -> Trace:
        random, builder = np.random.default_rng((seed, 3)), TraceBuilder(self)
        prompts = [builder.prompt(tokens) for tokens in PROMPTS]
        batches = self.batches_per_day / 24 / self.talks_per_hour
        time = 0.0
        while not builder.has_events(events, time):
            time += random.exponential(3600 / self.talks_per_hour)
            prompt = prompts[random.choice(len(prompts), p=PROMPT_SHARES)]
            self._talk(builder, prompt, time, random)
            for _ in range(random.poisson(batches)):
                self._batch(builder, prompts[random.choice(len(prompts))], time, random)
        return builder.trace(events)

    def _talk(
        self, builder: TraceBuilder, prompt: int, time: float, random: np.random.Generator
    ) -> None:
        session, is_pinned = builder.begin_session(prompt), random.random() < self.pinned
        for visit in range(random.geometric(1 / self.visits)):
            if visit:
                _, median, spread = GAPS[random.choice(len(GAPS), p=[gap[0] for gap in GAPS])]
                time += random.lognormal(np.log(median), spread)
            for _ in range(random.geometric(1 / self.turns)):
                prompt_tokens = _prompt_tokens(random)
                answer_tokens = 20 + int(random.exponential(280))
                time = builder.turn(session, time, prompt_tokens, answer_tokens, PERSON)
                if random.random() < self.again:
                    answer_tokens = 20 + int(random.exponential(280))
                    time = builder.regenerate(
                        session, time + 15.0, prompt_tokens, answer_tokens, PERSON
                    )
                time += random.lognormal(np.log(45.0), 0.9)
            if is_pinned and not visit:
                builder.pin(session, time, time + DAY)

    def _batch(
        self, builder: TraceBuilder, prompt: int, time: float, random: np.random.Generator
    ) -> None:
        for _ in range(self.batch):
            time += random.exponential(0.5)
            builder.turn(
                builder.begin_session(prompt),
                time,
                200 + int(random.exponential(3000)),
                150,
                PERSON,
            )


def _prompt_tokens(random: np.random.Generator) -> int:
    if random.random() < 0.05:
        return int(random.lognormal(np.log(6000), 0.6))  # a text is pasted in
    return 5 + int(random.lognormal(np.log(60), 0.9))


Part = ChatWorkload
