"""Keep entries that stand out beside those that came right after them; no attention needed.

Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important"
(2025), arXiv:2504.04704. Entries behind the first `sinks` are cut into partitions. Each channel of
a key is scaled by its lowest and highest value in the next partition; the standard deviation over
channels, by softmax over the partition, is the score, averaged with the same of the values. The
last whole partition and what lies behind it have nothing to be compared with, and stay.

Partitions are of the entries that a head holds. The released code never looks at one again once it
is compressed; here survivors are judged again whenever a plan is due, so take `lagged(tokens=lag)`
while generating.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.observation import Seen
from larder.core.types import Packed
from larder.policy.scorers.base import Scorer


class Within(Enum):
    """What an entry competes with."""

    PARTITION = "partition"
    HEAD = "head"


@dataclass(frozen=True)
class LagKV(Scorer):
    """Spread over channels, relative to the next partition.

    Args:
        sinks: entries at the start of a head that are not compared, and so rank above all that are.
        lag: entries of a partition, at least 2.
        within: `partition` ranks entries in their partition, so that each gives up the same share,
            as in the paper; `head` compares scores of all partitions.
    """

    sinks: int = 16
    lag: int = 128
    within: Within = Within.PARTITION

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise BadParameter(f"lagkv.sinks must be 0 or more, got {self.sinks}.")
        if self.lag < 2:
            raise BadParameter(f"lagkv.lag must be at least 2 entries, got {self.lag}.")

    def score(self, seen: Seen) -> Packed:
        entries = seen.entries
        heads = range(seen.layer.kv_heads)
        return torch.cat(
            [self._of_head(entries.head_keys(h), entries.head_values(h)) for h in heads]
        )

    def _of_head(
        self, keys: Float[Tensor, "S D"], values: Float[Tensor, "S D"]
    ) -> Float[Tensor, " S"]:
        """Below 1 for what is compared; the others by age, the latest highest."""
        places = torch.arange(len(keys), device=keys.device)
        scores = 1 + places / max(len(keys), 1)
        compared = (len(keys) - self.sinks) // self.lag - 1  # partitions
        if compared > 0:
            own = slice(self.sinks, self.sinks + compared * self.lag)
            scores[own] = ((self._shares(keys) + self._shares(values)) / 2).flatten()
            if self.within is Within.PARTITION:
                scores[own] = _ranks(scores[own].view(-1, self.lag)).flatten()
        return scores

    def _shares(self, states: Float[Tensor, "S D"]) -> Float[Tensor, "P lag"]:
        """Each entry's share of its partition, for all partitions that have a next one."""
        count = (len(states) - self.sinks) // self.lag
        cut = states[self.sinks : self.sinks + count * self.lag].float()
        parts = cut.view(count, self.lag, -1)
        low, high = parts[1:].amin(1, keepdim=True), parts[1:].amax(1, keepdim=True)
        width = torch.where(high > low, high - low, 1.0)
        return ((parts[:-1] - low) / width).std(-1).softmax(-1)


def _ranks(scores: Float[Tensor, "P lag"]) -> Float[Tensor, "P lag"]:
    """Places of scores in their partition, from 0 to below 1."""
    order = torch.sort(scores, dim=-1, stable=True).indices
    return order.argsort(-1) / scores.shape[-1]


Part = LagKV
