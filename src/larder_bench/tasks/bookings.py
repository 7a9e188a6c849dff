"""Bookings: questions about what was booked in dialogues.

Abhinav Rastogi et al., "Towards Scalable Multi-domain Conversational Agents: The Schema-Guided
Dialogue Dataset" (2020), arXiv:1909.05855: the dialogues and their last states, from the folder of
`--corpus`. The questions are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core import BadParameter, Conversation
from larder_bench.datasets.dialogue_corpus import bookings_conversation
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask, make_with_retries


@dataclass(frozen=True)
class Bookings(BenchTask):
    """Sessions of one or two dialogues each.

    Args:
        questions: number of questions, all different.
    """

    questions: int = 20

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"bookings.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        dialogues = sources.dialogues

        def generate(retry_seed: int) -> Conversation:
            return bookings_conversation(
                retry_seed, tokens, sources.count_tokens, dialogues, self.questions, share=1.0
            )

        return make_with_retries("bookings", seed, tokens, generate)


Part = Bookings
