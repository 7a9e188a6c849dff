"""Life-log: facts stated session by session, some of which change.

No paper for the generator; its kinds of questions come from Di Wu et al., "LongMemEval:
Benchmarking Chat Assistants on Long-Term Interactive Memory" (2024), arXiv:2410.10813, section 3:
`single` asks for the latest value of a fact, `session` for the session in which something first
came up, `twohop` for one attribute of something that another one identifies, `list` for all facts
about something, `update` only for facts that have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core import BadParameter, Conversation
from larder_bench.datasets.lifelog_questions import KINDS, lifelog_conversation
from larder_bench.datasets.lifelog_sessions import FACTS_PER_SESSION
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask, make_with_retries


@dataclass(frozen=True)
class Lifelog(BenchTask):
    """Sessions of a life-log.

    Args:
        questions: number of questions, all different.
        kinds: kinds of questions separated by commas, drawn in the proportions of the seed
            model's training.
        facts: facts per session; 0 for a random number from 3 to 9.
    """

    questions: int = 28
    kinds: str = "single,session,twohop,list"
    facts: int = 0

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"lifelog.questions must be 1 or more, got {self.questions}.")
        if self.facts < 0:
            raise BadParameter(f"lifelog.facts must be 0 or more, got {self.facts}.")
        if unknown := [kind for kind in self.kinds.split(",") if kind not in KINDS]:
            raise BadParameter(
                f"lifelog.kinds must name some of {','.join(KINDS)}, got {unknown[0]!r}."
            )

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        def generate(retry_seed: int) -> Conversation:
            kinds = self.kinds.split(",")
            facts = (self.facts, self.facts) if self.facts else FACTS_PER_SESSION
            return lifelog_conversation(
                retry_seed, tokens, sources.count_tokens, self.questions, kinds, facts
            )

        return make_with_retries("lifelog", seed, tokens, generate)


Part = Lifelog
