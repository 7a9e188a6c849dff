"""Base of measurements: numbers that describe a model independently of the input text."""

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
    """Unit of a measurement: one number per layer, kv head, query head, or channel of the keys of
    a kv head, of managed layers.
    """

    LAYER = "layer"
    KV_HEAD = "kv_head"
    QUERY_HEAD = "query_head"
    KEY_CHANNEL = "key_channel"

    def count(self, layer: LayerSpec) -> int:
        """Count of numbers for one layer."""
        if self is Granularity.LAYER:
            return 1
        if self is Granularity.KEY_CHANNEL:
            return layer.kv_heads * layer.head_dim
        return layer.kv_heads if self is Granularity.KV_HEAD else layer.query_heads


@dataclass(frozen=True)
class SampleText:
    """Bundled calibration text for one tokenizer.

    Args:
        encode: token ids of a text.
    """

    encode: Callable[[str], Sequence[int]]

    @cached_property
    def text(self) -> str:
        return (files("larder.models") / SAMPLE_FILE).read_text(encoding="utf-8")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Distinct lower-case words of the text, in alphabetical order."""
        plain = (word for word in self.text.split() if word.isalpha() and word.islower())
        return tuple(sorted({word for word in plain if len(word) >= SHORTEST_WORD}))

    def ids(self, tokens: int) -> tuple[int, ...]:
        """First `tokens` ids of the text, which repeats if it is shorter."""
        ids = tuple(self.encode(self.text))
        while len(ids) < tokens:  # a tokenizer with a large vocabulary needs fewer tokens
            ids += ids
        return ids[:tokens]

    def known(self) -> tuple[int, ...]:
        """Distinct token ids of the text, ascending."""
        return tuple(sorted(set(self.encode(self.text))))


class Measurement(ABC):
    """Base class of measurements: frozen dataclasses whose fields are stored with the values."""

    granularity: ClassVar[Granularity]

    @abstractmethod
    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        """Numbers in the order of managed layers, then heads.

        The attention matrix of all tokens is never in memory.
        """
