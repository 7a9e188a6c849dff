"""LoCoMo: questions about its conversations, for models that can answer them.

Adyasha Maharana et al., "Evaluating Very Long-Term Conversational Memory of LLM Agents" (2024),
arXiv:2402.17753. The files are in the folder `locomo` of `--data`; seeds select a file in turn, and
the session that the conversation starts with. A conversation that does not fit is cut at the end,
and only questions whose evidence is included are asked. Adversarial questions are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core import BadParameter, Conversation
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.transcripts import excerpt_conversation
from larder_bench.tasks.base import BenchTask


@dataclass(frozen=True)
class Locomo(BenchTask):
    """Conversation between two people, session by session.

    Args:
        questions: maximum number of questions; None for all that can be answered.
    """

    questions: int | None = None

    def __post_init__(self) -> None:
        if self.questions is not None and self.questions < 1:
            raise BadParameter(f"locomo.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        return excerpt_conversation("locomo", seed, tokens, self.questions, sources)


Part = Locomo
