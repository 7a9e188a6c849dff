"""Quantized storage of all but the latest entries (KIVI).

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024),
arXiv:2402.02750: keys share a scale per channel among neighboring tokens, values per token among
neighboring channels, and the latest tokens stay exact until they make a group. With `outliers > 0`
numbers that stand out are kept apart as in Hooper et al., "KVQuant: Towards 10 Million Context
Length LLM Inference with KV Cache Quantization" (2024), arXiv:2401.18079. Unlike KVQuant, keys are
rounded as they are cached, after the rotation, and on an even grid.

Under a budget this spends the bytes that it saves: as many more entries are kept as fit. Behind
park() it is what is parked that is held so, and the fast tier stays as it is: host memory is saved,
and what is recalled is turned back.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.codec import BITS, Codec
from larder.core.observation import Entries, LayerScores
from larder.core.types import Packed
from larder.policy.storage._mixed_precision import MixedPrecisionStorage, PrecisionTier


@dataclass(frozen=True)
class Quantized(MixedPrecisionStorage):
    """The latest entries exact, all others rounded.

    Args:
        bits: per number, from 1 to 8.
        group: entries rounded together, and channels of a value that share a scale.
        outliers: share of the numbers that are kept apart, exactly.
    """

    bits: int = 4
    group: int = 32
    outliers: float = 0.0

    def __post_init__(self) -> None:
        check_codec("quantized", self.bits, self.group, self.outliers)

    def tiers(self) -> tuple[PrecisionTier, ...]:
        return (PrecisionTier(Codec(self.bits, self.bits, self.group, self.outliers), 1.0),)

    @property
    def parked(self) -> Codec:
        return self.tiers()[0].codec

    def rank(self, scored: LayerScores, entries: Entries) -> Packed:
        return entries.packed_positions().float()


def check_codec(name: str, bits: int, group: int, outliers: float = 0.0) -> None:
    """Validate the parameters of a codec.

    Raises:
        BadParameter: a value out of range.
    """
    require(bits in BITS, f"{name}.bits", "from 1 to 8", bits)
    require(group >= 1, f"{name}.group", "at least 1 entry", group)
    require(0 <= outliers < 1, f"{name}.outliers", "a share in [0, 1)", outliers)


Part = Quantized
