"""Pass key: one number in a text of noise.

Amirkeivan Mohtashami and Martin Jaggi, "Landmark Attention: Random-Access Infinite Context Length
for Transformers" (2023), arXiv:2305.16300, section 4.2; the position of the key is random.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core import Conversation
from larder_bench.datasets.haystack import Haystack, needles_conversation
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask, make_with_retries


@dataclass(frozen=True)
class Passkey(BenchTask):
    """One pass key and one question.

    Args:
        hay: source of the haystack.
    """

    hay: Haystack = Haystack.NOISE

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        def generate(retry_seed: int) -> Conversation:
            return needles_conversation(
                retry_seed,
                tokens,
                sources.count_tokens,
                lambda random: self.hay.sentences(sources, random),
                "passkey",
                1,
                sources.wording,
            )

        return make_with_retries("passkey", seed, tokens, generate)


Part = Passkey
