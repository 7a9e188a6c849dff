"""Questions of RealTalk about its conversations, for models that can answer them.

Dong-Ho Lee et al., "REALTALK: A 21-Day Real-World Dataset for Long-Term Conversation" (2025),
arXiv:2502.13270. The files lie in the folder `realtalk` of `--data`; a seed stands for a file, by
turns, and for the session that the conversation starts with. Where it does not fit as a whole, what
follows is cut off, and only questions whose evidence is there are asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.conversation import Conversation
from larder.core.errors import BadParameter
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.transcripts import excerpt_conversation
from larder_bench.tasks.base import Task


@dataclass(frozen=True)
class Realtalk(Task):
    """Two people's talk, session by session.

    Args:
        questions: how many at most; left out, all that can be answered.
    """

    questions: int | None = None

    def __post_init__(self) -> None:
        if self.questions is not None and self.questions < 1:
            raise BadParameter(f"realtalk.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        return excerpt_conversation("realtalk", seed, tokens, self.questions, sources)


Part = Realtalk
