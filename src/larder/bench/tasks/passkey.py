"""The pass key: one number in a text of nothing.

Amirkeivan Mohtashami and Martin Jaggi, "Landmark Attention: Random-Access Infinite Context Length
for Transformers" (2023), arXiv:2305.16300, section 4.2; the place of the key is random.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.bench.hay import Hay
from larder.bench.luck import first_that_holds
from larder.bench.needles import needles_conversation
from larder.bench.sources import Sources
from larder.bench.task import Task
from larder.core.conversation import Conversation


@dataclass(frozen=True)
class Passkey(Task):
    """One pass key, one question."""

    hay: Hay = Hay.NOISE

    def make(self, seed: int, tokens: int, sources: Sources) -> Conversation:
        def made(own: int) -> Conversation:
            return needles_conversation(
                own,
                tokens,
                sources.count_tokens,
                lambda random: self.hay.sentences(sources, random),
                "passkey",
                1,
            )

        return first_that_holds("passkey", seed, tokens, made)


Part = Passkey
