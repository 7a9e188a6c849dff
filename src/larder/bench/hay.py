"""What needles lie in."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from random import Random

from larder.bench.sources import Sources

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)


class Hay(Enum):
    """TALK: small talk. PROSE: passages of a corpus, `--corpus FOLDER`. NOISE: the same five short
    sentences again and again, as pass keys were first hidden in.
    """

    TALK = "talk"
    PROSE = "prose"
    NOISE = "noise"

    def sentences(self, sources: Sources, random: Random) -> Iterator[str]:
        """Sentences without end.

        Raises:
            UsageError: there must be a corpus, and none was named.
        """
        if self is Hay.PROSE:
            return sources.sentences_of_prose(random)
        return _noise() if self is Hay.NOISE else sources.sentences_of_small_talk(random)


def _noise() -> Iterator[str]:
    while True:
        yield from NOISE
