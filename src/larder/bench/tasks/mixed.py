"""Sessions of a life-log and dialogues in which something is booked, by chance.

No paper for the mixture; see `lifelog` and `bookings`, whose questions it asks in equal shares. The
dialogues come from the folder of `--corpus`.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.bench.bookings import bookings_conversation
from larder.bench.luck import first_that_holds
from larder.bench.sources import Sources
from larder.bench.task import Task
from larder.core.conversation import Conversation
from larder.core.errors import BadParameter


@dataclass(frozen=True)
class Mixed(Task):
    """Sessions of two kinds.

    Args:
        questions: how many, all different.
    """

    questions: int = 24

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"mixed.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: Sources) -> Conversation:
        dialogues = sources.dialogues

        def made(own: int) -> Conversation:
            return bookings_conversation(
                own, tokens, sources.count_tokens, dialogues, self.questions, share=0.5
            )

        return first_that_holds("mixed", seed, tokens, made)


Part = Mixed
