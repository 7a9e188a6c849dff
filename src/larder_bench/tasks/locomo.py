"""Questions of LoCoMo about its conversations, for models that can answer them.

Adyasha Maharana et al., "Evaluating Very Long-Term Conversational Memory of LLM Agents" (2024),
arXiv:2402.17753. The files lie in the folder `locomo` of `--data`; a seed stands for a file, by
turns, and for the session that the conversation starts with. Where it does not fit as a whole, what
follows is cut off, and only questions whose evidence is there are asked. Adversarial questions are
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.conversation import Conversation
from larder.core.errors import BadParameter
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.transcripts import excerpt_conversation
from larder_bench.tasks.base import Task


@dataclass(frozen=True)
class Locomo(Task):
    """Two people's talk, session by session.

    Args:
        questions: how many at most; left out, all that can be answered.
    """

    questions: int | None = None

    def __post_init__(self) -> None:
        if self.questions is not None and self.questions < 1:
            raise BadParameter(f"locomo.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        return excerpt_conversation("locomo", seed, tokens, self.questions, sources)


Part = Locomo
