"""Needles in a haystack: single facts that stand once in a long text.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.1 (S-NIAH). RULER hides one needle; here a text holds several
that have nothing to do with each other, and each is asked for by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from larder.bench.hay import Hay
from larder.bench.luck import first_that_holds
from larder.bench.needles import needles_conversation
from larder.bench.sources import Sources
from larder.bench.task import Task
from larder.core.conversation import Conversation
from larder.core.errors import BadParameter


class Kind(Enum):
    """MAGIC: numbers of invented things. KV: lines of a name and a code. PASSKEY: the one pass key.
    ALTERNATING: one of these, by turns of the seed.
    """

    MAGIC = "magic"
    KV = "kv"
    PASSKEY = "passkey"
    ALTERNATING = "alternating"


TURNS = (Kind.MAGIC, Kind.KV, Kind.MAGIC, Kind.KV, Kind.PASSKEY)


@dataclass(frozen=True)
class Needles(Task):
    """Facts in a haystack.

    Args:
        needles: how many; there is only one pass key.
    """

    kind: Kind = Kind.ALTERNATING
    needles: int = 8
    hay: Hay = Hay.TALK

    def __post_init__(self) -> None:
        if self.needles < 1:
            raise BadParameter(f"needles.needles must be 1 or more, got {self.needles}.")

    def make(self, seed: int, tokens: int, sources: Sources) -> Conversation:
        kind = TURNS[seed % len(TURNS)] if self.kind is Kind.ALTERNATING else self.kind

        def made(own: int) -> Conversation:
            return needles_conversation(
                own,
                tokens,
                sources.count_tokens,
                lambda random: self.hay.sentences(sources, random),
                kind.value,
                self.needles,
            )

        return first_that_holds("needles", seed, tokens, made)


Part = Needles
