"""Storage of unimportant entries at low precision instead of their eviction (MiKV).

Yang et al., "No Token Left Behind: Reliable KV Cache Compression via Importance-Aware Mixed
Precision Quantization" (2024), arXiv:2402.18096. The scorer chooses important entries: those stay
exact, or at `high` bits; the others are held at `low` bits, and before they are rounded, key
channels are leveled by the square root of their largest query over their largest key, so that a
channel that stands out does not take the grid from the others. The paper's ratio looks at the
prompt's queries; here at the last `window`. Its formulas are known to us from the paper's abstract
and secondary accounts.

Under a budget this spends the bytes that it saves: nothing is evicted before all bytes are full of
entries at the lowest precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.codec import Codec
from larder.core.errors import BadParameter
from larder.core.observation import Observation, StorageStatistics
from larder.policy.storage._mixed_precision import MixedPrecisionStorage, PrecisionTier
from larder.policy.storage.quantized import check_codec


@dataclass(frozen=True)
class MiKV(MixedPrecisionStorage):
    """Important entries exact or at `high` bits, the others at `low` bits.

    Args:
        important: share of the bytes for important entries.
        high: bits of their numbers, 4 or 8; 0 leaves them exact.
        low: bits of the others, 2 or 4.
        group: entries rounded together, and channels of a value that share a scale.
        balance: exponent of the channel balancer; 0 turns it off.
        window: last queries that are observed, in tokens.
    """

    important: float = 0.25
    high: int = 0
    low: int = 2
    group: int = 32
    balance: float = 0.5
    window: int = 32

    def __post_init__(self) -> None:
        check_codec("mikv", self.low, self.group)
        require(0 <= self.important < 1, "mikv.important", "a share in [0, 1)", self.important)
        if self.high not in (0, 4, 8) or 0 < self.high <= self.low:
            raise BadParameter(
                f"mikv.high must be 4 or 8 and above low ({self.low}), or 0 for exact, got "
                f"{self.high}."
            )
        require(0 <= self.balance <= 1, "mikv.balance", "in [0, 1]", self.balance)
        require(self.window >= 1, "mikv.window", "at least 1 token", self.window)

    def tiers(self) -> tuple[PrecisionTier, ...]:
        low = Codec(self.low, self.low, self.group, balance=self.balance)
        lower = PrecisionTier(low, 1 - self.important)
        if not self.high:
            return (lower,)
        return PrecisionTier(Codec(self.high, self.high, self.group), self.important), lower

    def inspect(self, observation: Observation) -> StorageStatistics:
        if not self.balance:
            return StorageStatistics()
        return StorageStatistics(channels=channel_balance(observation, self.window))


def channel_balance(observation: Observation, window: int) -> Float[Tensor, "K D"]:
    """The largest key over the largest query of each channel, by absolute value."""
    entries = observation.entries
    heads = range(len(entries.lengths))
    keys = torch.stack([entries.head_keys(head).float().abs().amax(0) for head in heads])
    queries = observation.queries[:, -window:].float().abs().amax(1)  # [H, D]
    queries = queries.view(len(entries.lengths), -1, queries.shape[1]).amax(1)
    tiny = torch.finfo(torch.float32).tiny
    return keys.clamp(min=tiny) / queries.clamp(min=tiny)


Part = MiKV
