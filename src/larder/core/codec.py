"""How an entry is held at less than full precision: the word between a policy and a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from larder.core.errors import BadParameter
from larder.core.spec import POSITION_BYTES

BITS = (2, 4, 8)
SCALE_BYTES = 2  # float16, for a scale and for an offset
OUTLIER_BYTES = 4 + 2  # where it is, and its value in float16
CHANNEL_BYTES = 2  # which channel a group keeps; as much, in float16, for what levels it
GROUP_BYTES = 4 + 4  # whose a group is, and how many entries it has


class ScaleGranularity(Enum):
    """Which numbers have one offset and scale together.

    CHANNEL: those of one channel in all entries of a group.
    ENTRY: those of one entry in neighboring channels.
    """

    CHANNEL = "channel"
    ENTRY = "entry"


@dataclass(frozen=True)
class QuantizationScheme:
    """How one side of the entries, keys or values, is rounded, and what that costs.

    Args:
        bits: of a code; 0 where numbers stay as they are.
        channels: how many of them are kept.
        group: entries, or channels, that share an offset and a scale.
        outliers, balance: as in `Codec`.
        head_dim: channels that there are.
    """

    bits: int
    channels: int
    group: int
    sharing: ScaleGranularity
    outliers: float
    balance: float
    head_dim: int

    @property
    def scales_per_entry(self) -> int:
        """Offsets and scales of one entry, where each entry has its own."""
        return math.ceil(self.channels / self.group)

    def outlier_count(self, entries: int) -> int:
        """Numbers of a group of so many entries that are held apart."""
        return int(self.outliers * entries * self.channels) if self.bits else 0

    def entry_bytes(self, itemsize: int) -> int:
        """What every entry costs; a number that stays as it is has `itemsize` bytes."""
        if not self.bits:
            return self.channels * itemsize
        shared = 2 * SCALE_BYTES * self.scales_per_entry if self.sharing is ScaleGranularity.ENTRY else 0
        return math.ceil(self.channels / (8 // self.bits)) + shared

    @property
    def group_bytes(self) -> int:
        """What every group costs beside its entries, at most."""
        shared = 2 * SCALE_BYTES * self.channels if self.sharing is ScaleGranularity.CHANNEL else 0
        chosen = CHANNEL_BYTES * self.channels if self.channels < self.head_dim else 0
        if not self.bits:
            return chosen
        leveled = CHANNEL_BYTES * self.channels if self.balance else 0
        return shared + chosen + leveled + OUTLIER_BYTES * self.outlier_count(self.group)


@dataclass(frozen=True)
class Codec:
    """One grade of precision of a cache.

    Keys share an offset and a scale per channel among the entries of a group, values among the
    channels of an entry: keys have channels of their own size, values do not. Numbers that stand
    far out are kept apart.

    Args:
        key_bits, value_bits: 2, 4 or 8; 0 leaves them as they are.
        group: entries that share the offset and scale of a key channel; also channels of a value
            that share theirs (the last group of channels may be smaller).
        outliers: share of the numbers, those farthest from the middle of their group, that are
            held apart as float16.
        channels: share of the key channels that is kept; the others count as 0.
        balance: how strongly channel weights level the key channels before they are rounded, as
            an exponent; 0 not at all. Leveled keys share offsets and scales as values do, among
            the channels of an entry: per channel, leveling would change nothing.
    """

    key_bits: int = 4
    value_bits: int = 4
    group: int = 32
    outliers: float = 0.0
    channels: float = 1.0
    balance: float = 0.0

    def __post_init__(self) -> None:
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if bits not in (0, *BITS):
                raise BadParameter(f"codec.{name} must be 0, 2, 4 or 8, got {bits}.")
        if self.group < 1:
            raise BadParameter(f"codec.group must be at least 1, got {self.group}.")
        if not 0 <= self.outliers < 1:
            raise BadParameter(f"codec.outliers must be in [0, 1), got {self.outliers}.")
        if not 0 < self.channels <= 1:
            raise BadParameter(f"codec.channels must be in (0, 1], got {self.channels}.")
        if not 0 <= self.balance < math.inf:
            raise BadParameter(f"codec.balance must be at least 0, got {self.balance}.")
        if self.balance and self.channels < 1:
            raise BadParameter(
                f"codec.channels must be 1 where balance is above 0, got {self.channels}: one "
                "weight per channel cannot both choose and level."
            )

    def keys(self, head_dim: int) -> QuantizationScheme:
        """How keys of this size are rounded."""
        sharing = ScaleGranularity.ENTRY if self.balance else ScaleGranularity.CHANNEL
        kept = max(round(self.channels * head_dim), 1)
        return QuantizationScheme(
            self.key_bits, kept, self.group, sharing, self.outliers, self.balance, head_dim
        )

    def values(self, head_dim: int) -> QuantizationScheme:
        """How values of this size are rounded."""
        own = (self.group, ScaleGranularity.ENTRY, self.outliers, 0.0, head_dim)
        return QuantizationScheme(self.value_bits, head_dim, *own)

    @property
    def min_group_entries(self) -> int:
        """Entries of a group that stays as it is when others leave it: half of a full one."""
        return (self.group + 1) // 2

    def group_bytes(self, head_dim: int) -> int:
        """What a group costs beside its entries, at most."""
        return GROUP_BYTES + self.keys(head_dim).group_bytes + self.values(head_dim).group_bytes

    def bytes_per_entry(self, head_dim: int, itemsize: int) -> float:
        """What an entry costs at most, in groups that are half full; columns of a ledger excluded.

        A store holds no more than this for each coded entry, and one group beside them per head.

        Args:
            itemsize: bytes of a number that is left as it is.
        """
        sides = self.keys(head_dim), self.values(head_dim)
        own = POSITION_BYTES + sum(side.entry_bytes(itemsize) for side in sides)
        return own + self.group_bytes(head_dim) / self.min_group_entries
