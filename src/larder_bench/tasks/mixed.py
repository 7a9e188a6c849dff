"""Random mixture of life-log sessions and dialogues with bookings.

No paper for the mixture; see `lifelog` and `bookings`, whose questions it asks in equal shares. The
dialogues come from the folder of `--corpus`.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core import BadParameter, Conversation
from larder_bench.datasets.dialogue_corpus import bookings_conversation
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask, make_with_retries


@dataclass(frozen=True)
class MixedTask(BenchTask):
    """Sessions of two kinds.

    Args:
        questions: number of questions, all different.
    """

    questions: int = 24

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"mixed.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        dialogues = sources.dialogues

        def generate(retry_seed: int) -> Conversation:
            return bookings_conversation(
                retry_seed, tokens, sources.count_tokens, dialogues, self.questions, share=0.5
            )

        return make_with_retries("mixed", seed, tokens, generate)


Part = MixedTask
