"""Quantization of cache entries: bits, groups and byte costs of each precision below the full one,
transform coding, and coding of residuals.

Policies choose a `Codec`, a `TransformSpec` or a `ResidualSpec`, caches carry it out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.spec import POSITION_BYTES

BITS = tuple(range(1, 9))
SCALE_BYTES = 2  # float16, for a scale and for an offset
OUTLIER_BYTES = 4 + 2  # its index, and its value in float16
CHANNEL_BYTES = 2  # index of a kept channel, or its balance weight in float16
GROUP_BYTES = 4 + 4  # owner of a group, and its number of entries
LAST_TIER = 2  # tiers are -2 to 2: steps of 1/4 to 4 times the common step
NUM_TIERS = 2 * LAST_TIER + 1
TIER_GRADE = 1 + LAST_TIER  # grade of tier 0; grade 0 is exact, 1 the finest tier
# Fields of a codec that are members of an enumeration.
ENUM_FIELDS = ("key_scales", "key_grid", "value_grid")
LEVELS_CALIBRATION = "kvquant"
LEVEL_BITS = (2, 3, 4)
VECTOR_BITS = (1, 2, 3, 4)


def bit_fields(bits: int) -> tuple[tuple[int, int], ...]:
    """Width and shift of the fields that a code of some bits is packed in: 8, 4, 2 or 1 bits each.

    A field divides a byte evenly, so that bytes hold whole fields; the highest bits come first.
    """
    fields, left = list[tuple[int, int]](), bits
    for width in (8, 4, 2, 1):
        if bits & width:
            left -= width
            fields.append((width, left))
    return tuple(fields)


class ScaleGranularity(Enum):
    """Set of numbers that share one offset and scale.

    CHANNEL: one channel in all entries of a group.
    ENTRY: neighboring channels of one entry.
    """

    CHANNEL = "channel"
    ENTRY = "entry"


class Grid(Enum):
    """Levels of codes.

    EVEN: evenly spaced, from an offset on.
    NORMAL: those of least squared error for a vector that is rotated at random.
    SKETCHED: the same of one bit fewer, and the sign of a random projection of the remainder.
    """

    EVEN = "even"
    NORMAL = "normal"
    SKETCHED = "sketched"


@dataclass(frozen=True)
class QuantizationScheme:
    """Quantization of keys or of values, and its byte costs.

    Args:
        bits: per number; 0 leaves numbers unquantized.
        channels: channels that are stored.
        group: entries, or channels, that share an offset and a scale.
        outliers, balance: as in `Codec`.
        head_dim: channels before pruning.
        grid: levels of codes; of other than even ones an entry has a norm, and none of the rest.
    """

    bits: int
    channels: int
    group: int
    sharing: ScaleGranularity
    outliers: float
    balance: float
    head_dim: int
    grid: Grid = Grid.EVEN

    @property
    def norms_per_entry(self) -> int:
        """Norms of one entry: its own, and that of the remainder of a sketch."""
        return {Grid.EVEN: 0, Grid.NORMAL: 1, Grid.SKETCHED: 2}[self.grid]

    @property
    def scales_per_entry(self) -> int:
        """Offset and scale pairs of one entry, where the granularity is `ENTRY`."""
        return math.ceil(self.channels / self.group)

    def outlier_count(self, entries: int) -> int:
        """Outliers stored separately in a group of `entries` entries."""
        return int(self.outliers * entries * self.channels) if self.bits else 0

    def entry_bytes(self, itemsize: int) -> int:
        """Bytes of an entry, its group excluded; an unquantized number has `itemsize` bytes."""
        if not self.bits:
            return self.channels * itemsize
        shared = SCALE_BYTES * self.norms_per_entry
        if self.grid is Grid.EVEN and self.sharing is ScaleGranularity.ENTRY:
            shared = 2 * SCALE_BYTES * self.scales_per_entry
        packed = sum(math.ceil(self.channels / (8 // width)) for width, _ in bit_fields(self.bits))
        return packed + shared

    @property
    def group_bytes(self) -> int:
        """Upper bound on the bytes of a group beside its entries."""
        shared = 2 * SCALE_BYTES * self.channels if self.sharing is ScaleGranularity.CHANNEL else 0
        chosen = CHANNEL_BYTES * self.channels if self.channels < self.head_dim else 0
        if not self.bits:
            return chosen
        leveled = CHANNEL_BYTES * self.channels if self.balance else 0
        return shared + chosen + leveled + OUTLIER_BYTES * self.outlier_count(self.group)


@dataclass(frozen=True)
class Codec:
    """Precision grade of a cache.

    Keys share an offset and a scale per channel among the entries of a group, values among the
    channels of an entry: the magnitude of keys differs by channel, that of values does not. Keys
    can share theirs as values do (`key_scales`). Outliers are stored separately.

    Args:
        key_bits, value_bits: 1 to 8; 0 leaves them unquantized.
        group: entries that share the offset and scale of a key channel; also channels of a value
            that share theirs (the last group of channels may be smaller).
        outliers: share of the numbers in [0, 1), those farthest from the middle of their group,
            that are stored as float16.
        channels: share of the key channels in (0, 1] that is stored; the others are read as 0.
        balance: exponent of the channel weights that scale key channels before rounding; 0 turns
            balancing off. Balanced keys share offsets and scales among the channels of an entry,
            as values do: per channel, balancing would change nothing.
        key_scales: which numbers of keys share an offset and a scale, without balancing.
        key_grid, value_grid: levels of codes.

    Raises:
        BadParameter: a value out of range, or `balance` together with `channels` below 1, or other
            than even levels together with outliers, pruned or balanced channels.
    """

    key_bits: int = 4
    value_bits: int = 4
    group: int = 32
    outliers: float = 0.0
    channels: float = 1.0
    balance: float = 0.0
    key_scales: ScaleGranularity = ScaleGranularity.CHANNEL
    key_grid: Grid = Grid.EVEN
    value_grid: Grid = Grid.EVEN

    def __post_init__(self) -> None:
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            require(bits in (0, *BITS), f"codec.{name}", "a whole number from 0 to 8", bits)
        require(self.group >= 1, "codec.group", "at least 1", self.group)
        require(0 <= self.outliers < 1, "codec.outliers", "in [0, 1)", self.outliers)
        require(0 < self.channels <= 1, "codec.channels", "in (0, 1]", self.channels)
        require(0 <= self.balance < math.inf, "codec.balance", "at least 0", self.balance)
        if self.balance and self.channels < 1:
            raise BadParameter(
                f"codec.channels must be 1 where balance is above 0, got {self.channels}: one "
                "weight per channel cannot both select and balance."
            )
        is_even = self.key_grid is Grid.EVEN and self.value_grid is Grid.EVEN
        if not is_even and (self.outliers or self.balance or self.channels < 1):
            raise BadParameter(
                "codec.key_grid and value_grid must be even with outliers, balance or channels: "
                "those are parts of even levels."
            )

    def to_fields(self) -> dict[str, int | float | str]:
        """Fields as sessions save them; granularity and levels only where they are not usual."""
        plain = Codec()
        fields = asdict(self) | {name: getattr(self, name).value for name in ENUM_FIELDS}
        usual = [name for name in ENUM_FIELDS if getattr(self, name) is getattr(plain, name)]
        return {name: value for name, value in fields.items() if name not in usual}

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Codec:
        """Codec from its fields."""
        numbers = {name: field for name, field in fields.items() if name not in ENUM_FIELDS}
        return Codec(
            **numbers,
            key_scales=ScaleGranularity(fields.get("key_scales", ScaleGranularity.CHANNEL.value)),
            key_grid=Grid(fields.get("key_grid", Grid.EVEN.value)),
            value_grid=Grid(fields.get("value_grid", Grid.EVEN.value)),
        )

    def keys(self, head_dim: int) -> QuantizationScheme:
        """Scheme of keys of `head_dim` channels."""
        by_entry = self.balance or self.key_grid is not Grid.EVEN
        sharing = ScaleGranularity.ENTRY if by_entry else self.key_scales
        kept = max(round(self.channels * head_dim), 1)
        return QuantizationScheme(
            self.key_bits,
            kept,
            self.group,
            sharing,
            self.outliers,
            self.balance,
            head_dim,
            self.key_grid,
        )

    def values(self, head_dim: int) -> QuantizationScheme:
        """Scheme of values of `head_dim` channels."""
        return QuantizationScheme(
            self.value_bits,
            head_dim,
            self.group,
            ScaleGranularity.ENTRY,
            self.outliers,
            0.0,
            head_dim,
            self.value_grid,
        )

    @property
    def min_group_entries(self) -> int:
        """Fewest entries of a group that is not encoded again after evictions: half of a full
        one.
        """
        return (self.group + 1) // 2

    def group_bytes(self, head_dim: int) -> int:
        """Upper bound on the bytes of a group of keys and values beside its entries."""
        return GROUP_BYTES + self.keys(head_dim).group_bytes + self.values(head_dim).group_bytes

    def bytes_per_entry(self, head_dim: int, itemsize: int) -> float:
        """Upper bound on the bytes of an entry, in half-full groups; ledger columns excluded.

        A store holds at most this per quantized entry, plus one group per head.

        Args:
            itemsize: bytes of an unquantized number.
        """
        sides = self.keys(head_dim), self.values(head_dim)
        own_bytes = POSITION_BYTES + sum(side.entry_bytes(itemsize) for side in sides)
        return own_bytes + self.group_bytes(head_dim) / self.min_group_entries


class Coder(Enum):
    """Coder of quantized components.

    ENTROPY: a range coder with static tables; a block of entries is decoded as a whole.
    WIDTHS: a fixed number of bits per component, 0 to 8; any entry can be decoded alone.
    PLANES: planes of bits, with one of 16 codes for a component of 64 entries; read without
        arithmetic, in about as many bits as the range coder takes.
    LEVELS: calibrated levels, unevenly spaced; numbers that stand out are kept apart.
    """

    ENTROPY = "entropy"
    PLANES = "planes"
    WIDTHS = "widths"
    LEVELS = "levels"


class RopeStage(Enum):
    """Keys that are transformed: those before their rotary embedding, or those after it."""

    BEFORE = "before"
    AFTER = "after"


class MeanSource(Enum):
    """Mean that transformed keys and values are centered on.

    MODEL: that of the calibration text.
    TEXT: that of the coded entries of each head, which is kept beside them.
    """

    MODEL = "model"
    TEXT = "text"


# Calibration of a transform, by the power of the metric and by what is transformed.
CALIBRATIONS = {
    (0.5, RopeStage.BEFORE): "transform",
    (0.0, RopeStage.BEFORE): "transform_unweighted",
    (1.0, RopeStage.BEFORE): "transform_full_metric",
    (0.5, RopeStage.AFTER): "transform_after_rope",
}


@dataclass(frozen=True)
class TransformSpec:
    """Transform-coded storage of the managed layers of a cache.

    Args:
        coder: of the quantized components.
        sinks: first positions that are never coded.
        recent: latest entries of a head that stay exact while text is generated.
        block: most entries of a head that are coded together.
        model: fingerprint of the model whose calibration codes the entries.
        metric: power of the metrics of keys and values, 0, 0.5 or 1.
        rope: keys that are transformed.
        mean: that components are centered on.
        level_bits: of the code of a level, 2 to 4, where the coder has levels; 0 elsewhere.
        outliers: most numbers that are kept apart, as a share, where the coder has levels.
        bits: per number of the calibration text, where these decide the step; 0 where plans do.

    Raises:
        BadParameter: a value out of range, or no calibration has the metric and the keys.
    """

    coder: Coder = Coder.ENTROPY
    sinks: int = 1
    recent: int = 1
    block: int = 256
    model: str = ""
    metric: float = 0.5
    rope: RopeStage = RopeStage.BEFORE
    mean: MeanSource = MeanSource.TEXT
    level_bits: int = 0
    outliers: float = 0.0
    bits: float = 0.0

    def __post_init__(self) -> None:
        numbers = ("sinks", self.sinks, 0), ("recent", self.recent, 0), ("block", self.block, 1)
        for name, value, least in numbers:
            require(value >= least, f"transform.{name}", f"at least {least}", value)
        if (self.metric, self.rope) not in CALIBRATIONS:
            raise BadParameter(
                f"transform.metric must be 0, 0.5 or 1, and 0.5 where rope is after, got "
                f"{self.metric} and {self.rope.value}."
            )

    @property
    def calibration(self) -> str:
        """Name of the measurement of a model that has the transforms."""
        if self.coder is Coder.LEVELS:
            return LEVELS_CALIBRATION
        return CALIBRATIONS[self.metric, self.rope]

    def of_model(self, fingerprint: str) -> TransformSpec:
        """Spec with the fingerprint of a model."""
        return replace(self, model=fingerprint)

    def to_text(self) -> str:
        """Text form, as sessions save it."""
        named = {"coder": self.coder.value, "rope": self.rope.value, "mean": self.mean.value}
        fields = asdict(self) | named
        return json.dumps({name: fields[name] for name in fields if name != "bits" or self.bits})

    @staticmethod
    def from_text(text: str) -> TransformSpec:
        """Spec from its text form."""
        fields = json.loads(text)
        own = {
            "coder": Coder(fields["coder"]),
            "rope": RopeStage(fields.get("rope", RopeStage.BEFORE.value)),
            "mean": MeanSource(fields.get("mean", MeanSource.MODEL.value)),
        }
        return TransformSpec(**fields | own)


@dataclass(frozen=True)
class ResidualSpec:
    """Coding of what a prediction from the layer below leaves, in the managed layers of a cache.

    Args:
        bits: per number of a residual, 1 to 4.
        first_bits: per number of the first layer, which has nothing below.
        sinks: first positions that stay exact.
        recent: latest positions that stay exact.
        model: fingerprint of the model whose predictions are taken.
    """

    bits: int = 2
    first_bits: int = 4
    sinks: int = 4
    recent: int = 128
    model: str = ""

    def __post_init__(self) -> None:
        for name, bits in (("bits", self.bits), ("first_bits", self.first_bits)):
            require(bits in VECTOR_BITS, f"aqua.{name}", "a whole number from 1 to 4", bits)
        for name, tokens in (("sinks", self.sinks), ("recent", self.recent)):
            require(tokens >= 0, f"aqua.{name}", "at least 0", tokens)

    def token_bytes(self, width: int, index: int) -> int:
        """Bytes of a coded token in the layer `index`: codes and scales of both sides, position.

        Args:
            width: numbers of its keys, all kv heads together.
        """
        bits = 2 * (self.bits if index else self.first_bits)
        packed = sum(math.ceil(width / 2 / (8 // field)) for field, _ in bit_fields(bits))
        return 2 * (packed + SCALE_BYTES * (width // hadamard_order(width))) + POSITION_BYTES

    def of_model(self, fingerprint: str) -> ResidualSpec:
        """Spec with the fingerprint of a model."""
        return replace(self, model=fingerprint)

    def to_text(self) -> str:
        """Text form, as sessions save it."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> ResidualSpec:
        """Spec from its text form."""
        return ResidualSpec(**json.loads(text))


def hadamard_order(width: int) -> int:
    """Largest order of a Hadamard matrix that divides a width: a power of two, or 12 or 20 times
    one.
    """
    power = width & -width
    for odd in (5, 3):
        if power % 4 == 0 and width % (odd * power) == 0:
            return odd * power
    return power
