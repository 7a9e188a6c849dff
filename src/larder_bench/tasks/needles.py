"""Needles in a haystack: single facts that appear once in a long text.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.1 (S-NIAH). RULER hides one needle; here a text holds several
unrelated ones, and each is asked for in a question of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from larder.core import BadParameter, Conversation
from larder_bench.datasets.haystack import Haystack, needles_conversation
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask, make_with_retries


class NeedleKind(Enum):
    """Kind of needles.

    MAGIC: numbers of invented things.
    KV: lines of a name and a code.
    PASSKEY: a single pass key.
    ALTERNATING: one of these in turn, by seed.
    """

    MAGIC = "magic"
    KV = "kv"
    PASSKEY = "passkey"
    ALTERNATING = "alternating"


TURNS = (NeedleKind.MAGIC, NeedleKind.KV, NeedleKind.MAGIC, NeedleKind.KV, NeedleKind.PASSKEY)


@dataclass(frozen=True)
class NeedlesTask(BenchTask):
    """Facts in a haystack.

    Args:
        kind: kind of facts.
        needles: number of facts; there is only one pass key.
        hay: source of the haystack.
    """

    kind: NeedleKind = NeedleKind.ALTERNATING
    needles: int = 8
    hay: Haystack = Haystack.TALK

    def __post_init__(self) -> None:
        if self.needles < 1:
            raise BadParameter(f"needles.needles must be 1 or more, got {self.needles}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        kind = TURNS[seed % len(TURNS)] if self.kind is NeedleKind.ALTERNATING else self.kind

        def generate(retry_seed: int) -> Conversation:
            return needles_conversation(
                retry_seed,
                tokens,
                sources.count_tokens,
                lambda random: self.hay.sentences(sources, random),
                kind.value,
                self.needles,
                sources.wording,
            )

        return make_with_retries("needles", seed, tokens, generate)


Part = NeedlesTask
