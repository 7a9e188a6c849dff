"""What every measurement can be asked: numbers about a model that no text will change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib.resources import files
from typing import ClassVar

from larder.core.spec import LayerSpec
from larder.models.decoder import Decoder

SAMPLE_FILE = "calibration.txt"
SHORTEST_WORD = 4  # letters


class Granularity(Enum):
    """What a measurement has a number for, layer by layer over the managed layers."""

    LAYER = "layer"
    KV_HEAD = "kv_head"
    QUERY_HEAD = "query_head"

    def count(self, layer: LayerSpec) -> int:
        """Numbers for one layer."""
        if self is Granularity.LAYER:
            return 1
        return layer.kv_heads if self is Granularity.KV_HEAD else layer.query_heads


@dataclass(frozen=True)
class SampleText:
    """The bundled text, for a model's tokenizer.

    Args:
        encode: token ids of a text.
    """

    encode: Callable[[str], Sequence[int]]

    @cached_property
    def text(self) -> str:
        return (files("larder.models") / SAMPLE_FILE).read_text(encoding="utf-8")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Its plain words, each once, in alphabetical order."""
        plain = (word for word in self.text.split() if word.isalpha() and word.islower())
        return tuple(sorted({word for word in plain if len(word) >= SHORTEST_WORD}))

    def ids(self, tokens: int) -> tuple[int, ...]:
        """Its first tokens; again from the start where there are not as many."""
        ids = tuple(self.encode(self.text))
        while len(ids) < tokens:  # a tokenizer with a large vocabulary needs fewer tokens
            ids += ids
        return ids[:tokens]

    def known(self) -> tuple[int, ...]:
        """The token ids that occur in it, each once, in order."""
        return tuple(sorted(set(self.encode(self.text))))


class Measurement(ABC):
    """A frozen dataclass; a file that was measured with other parameters is measured anew."""

    granularity: ClassVar[Granularity]

    @abstractmethod
    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        """Its numbers, layer by layer over the managed layers, and head by head within each.

        Attention of all tokens to all tokens is never held.
        """
