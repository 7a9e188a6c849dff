"""Dialogues in which something is booked, and what was booked.

Abhinav Rastogi et al., "Towards Scalable Multi-domain Conversational Agents: The Schema-Guided
Dialogue Dataset" (2020), arXiv:1909.05855: the dialogues and their last states, from the folder of
`--corpus`. The questions are ours.
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
class Bookings(Task):
    """Sessions of one or two dialogues each.

    Args:
        questions: how many, all different.
    """

    questions: int = 20

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"bookings.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: Sources) -> Conversation:
        dialogues = sources.dialogues

        def made(own: int) -> Conversation:
            return bookings_conversation(
                own, tokens, sources.count_tokens, dialogues, self.questions, share=1.0
            )

        return first_that_holds("bookings", seed, tokens, made)


Part = Bookings
