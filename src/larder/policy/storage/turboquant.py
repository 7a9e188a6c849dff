"""Storage at levels of least error behind a random rotation (TurboQuant, and QJL with one bit).

Zandieh, Daliri, Hadian, Mirrokni, "TurboQuant: Online Vector Quantization with Near-optimal
Distortion Rate" (2025), arXiv:2504.19874: a key or value is divided by its norm, rotated at random,
and each number takes the nearest level for a random direction; nothing is calibrated. With
`keys="sketched"` one bit of a key is the sign of a projected remainder, so that logits are
unbiased; `keys="sketched"` and one bit is Zandieh, Daliri, Han, "QJL: 1-Bit Quantized JL Transform
for KV Cache Quantization with Zero Overhead" (2024), arXiv:2406.03482.

Differences: keys are rounded as they are cached, after their rotary embedding; channels with large
numbers do not get a bit more (2.5 and 3.5 bits of the paper): all have the same whole number; the
latest entries of a head are exact until they make a group. Which of the two kinds of code the paper
takes for keys of a cache is not known to us: the one without a sketch is the default here, since
its error is smaller.

Under a budget this spends the bytes that it saves: as many more entries are kept as fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.codec import Codec, Grid
from larder.core.errors import BadParameter
from larder.core.observation import Entries, LayerScores
from larder.core.types import Packed
from larder.policy.storage._mixed_precision import MixedPrecisionStorage, PrecisionTier
from larder.policy.storage.quantized import check_codec


@dataclass(frozen=True)
class TurboQuant(MixedPrecisionStorage):
    """The latest entries exact, all others rotated and rounded.

    Args:
        bits: per number, from 1 to 8, beside a norm of two bytes.
        keys: levels of keys, `normal` or `sketched`.
        group: entries of a head that are coded together.
    """

    bits: int = 3
    keys: Grid = Grid.NORMAL
    group: int = 32

    def __post_init__(self) -> None:
        check_codec("turboquant", self.bits, self.group)
        if self.keys is Grid.EVEN:
            raise BadParameter(
                "turboquant.keys must be normal or sketched, got even: take quantized()."
            )

    def tiers(self) -> tuple[PrecisionTier, ...]:
        bits, levels = self.bits, Grid.NORMAL
        codec = Codec(bits, bits, self.group, key_grid=self.keys, value_grid=levels)
        return (PrecisionTier(codec, 1.0),)

    def rank(self, scored: LayerScores, entries: Entries) -> Packed:
        return entries.packed_positions().float()


Part = TurboQuant
