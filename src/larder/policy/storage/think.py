"""Storage of keys without their least important channels (ThinK).

Xu et al., "ThinK: Thinner Key Cache by Query-Driven Pruning" (2024), arXiv:2407.21018, section 3:
a channel of a kv head counts what its queries times its keys amount to, the Frobenius norm of their
product; the channels that count least are not stored. As in the released code and the paper's
appendix the latest entries keep all channels, and only the last queries are observed; under a
budget, the keys that stay count. Differences: entries are pruned a group at a time, each with the
channels that count at that time, where the paper decides once after the prompt; query heads that
share a kv head are averaged; of `channels` times the head size the nearest whole number stays,
where the paper rounds down and the released code up.

Under a budget this spends the bytes that it saves: as many more entries are kept as fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.codec import Codec
from larder.core.observation import Entries, LayerScores, Observation, StorageStatistics
from larder.core.plan import Plan
from larder.core.types import Packed
from larder.policy.storage._mixed_precision import MixedPrecisionStorage, PrecisionTier


@dataclass(frozen=True)
class ThinK(MixedPrecisionStorage):
    """All entries but the latest keep a share of their key channels.

    Args:
        channels: the share that is kept.
        group: entries pruned together; as many at the end are whole.
        window: queries at the end that say which channels count, in tokens.
    """

    channels: float = 0.6
    group: int = 32
    window: int = 32

    def __post_init__(self) -> None:
        require(0 < self.channels < 1, "think.channels", "a share in (0, 1)", self.channels)
        for name, count in (("group", self.group), ("window", self.window)):
            require(count >= 1, f"think.{name}", "at least 1", count)

    def tiers(self) -> tuple[PrecisionTier, ...]:
        return (PrecisionTier(Codec(0, 0, self.group, channels=self.channels), 1.0),)

    def rank(self, scored: LayerScores, entries: Entries) -> Packed:
        return entries.packed_positions().float()

    def inspect(self, observation: Observation) -> StorageStatistics:
        return StorageStatistics(channels=query_energies(observation, self.window))

    def grade(
        self, plan: Plan, entries: Entries, scored: LayerScores, quota: int, share: float
    ) -> Plan:
        graded = super().grade(plan, entries, scored, quota, share)
        return replace(graded, channels=graded.channels * kept_key_energies(plan, entries))


def query_energies(observation: Observation, window: int) -> Float[Tensor, "K D"]:
    """Mean square of each channel of the last queries, over the query heads of a group."""
    queries = observation.queries[:, -window:].float().square().mean(1)  # [H, D]
    return queries.view(len(observation.entries.lengths), -1, queries.shape[1]).mean(1)


def kept_key_energies(plan: Plan, entries: Entries) -> Float[Tensor, "K D"]:
    """Mean square of each channel of the keys that a plan keeps; 0 for a head that keeps none."""
    squares = entries.pack(entries.keys)[plan.kept].float().square()
    heads = torch.split(squares, list(plan.lengths))
    return torch.stack([head.sum(0) / max(len(head), 1) for head in heads])


Part = ThinK
