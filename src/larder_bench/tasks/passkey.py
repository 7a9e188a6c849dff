"""The pass key: one number in a text of nothing.

Amirkeivan Mohtashami and Martin Jaggi, "Landmark Attention: Random-Access Infinite Context Length
for Transformers" (2023), arXiv:2305.16300, section 4.2; the place of the key is random.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.conversation import Conversation
from larder_bench.datasets.haystack import Haystack, needles_conversation
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import Task, make_with_retries


@dataclass(frozen=True)
class Passkey(Task):
    """One pass key, one question."""

    hay: Haystack = Haystack.NOISE

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        def made(own: int) -> Conversation:
            return needles_conversation(
                own,
                tokens,
                sources.count_tokens,
                lambda random: self.hay.sentences(sources, random),
                "passkey",
                1,
            )

        return make_with_retries("passkey", seed, tokens, made)


Part = Passkey
