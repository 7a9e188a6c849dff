"""Scorer by deviation from the entries that follow; no attention needed (LagKV).

Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important"
(2025), arXiv:2504.04704. The first `sinks` entries stay. Those behind them are cut into
partitions. Each channel of a key is scaled by its lowest and highest value in the next partition;
the standard deviation over channels, by softmax over the partition, is the score, averaged with
the same of the values. The last whole partition and what lies behind it have nothing to be
compared with, and stay.

The paper keeps a share of each partition, so the cache grows with the text, and what is not
compared is small beside it. Under a fixed budget it need not be: up to two partitions are not
compared, and would take all of a budget of two. So the lag, where none is given, follows from what
the budget leaves behind the sinks: 32, or a thirty-second of that where it is more, and never more
than an eighth. That is 128 at 4,096 entries and, as in the released code, 1,024 at 32,768.

Partitions are of the entries that a head holds. The released code attends to the whole prompt, then
compresses it, and never looks again at a partition that it has compressed. Read `whole()` and with
plans for the prompt alone, this does the same. With plans while blocks are read or text is
generated, survivors are judged again, because a budget that does not grow must cut them again;
under `freeze()` the partitions of a turn begin behind the watermark, and none is judged twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers.base import Scorer

MOST_LAG = 1024  # entries of a partition in the released code


class Within(Enum):
    """Scope in which entries compete."""

    PARTITION = "partition"
    HEAD = "head"


@dataclass(frozen=True)
class LagKV(Scorer):
    """Standard deviation over channels, relative to the next partition.

    Args:
        sinks: entries at the start of a head, which always stay; 16 in the released code.
        lag: entries of a partition, at least 2; open, it follows from the budget.
        within: `partition` ranks entries in their partition, so that each gives up the same share,
            as in the paper, and of entries of the same rank the lowest score goes first; `head`
            compares scores of all partitions.
    """

    sinks: int = 16
    lag: int | None = None
    within: Within = Within.PARTITION

    def __post_init__(self) -> None:
        require(self.sinks >= 0, "lagkv.sinks", "0 or more", self.sinks)
        require(self.lag is None or self.lag >= 2, "lagkv.lag", "at least 2 entries", self.lag)

    def with_budget(self, tokens: int) -> LagKV:
        return self if self.lag is not None else replace(self, lag=self._lag(tokens))

    def protected_tokens(self) -> ProtectedTokens:
        """The sinks."""
        return ProtectedTokens(first=self.sinks)

    def score(self, observation: Observation) -> Packed:
        entries, scores = observation.entries, list[Tensor]()
        for head in range(observation.layer.kv_heads):
            keys, values = entries.head_keys(head), entries.head_values(head)
            frozen = int((entries.head_positions(head) < observation.watermark).sum())
            scores.append(self._of_head(keys, values, max(self.sinks, frozen)))
        return torch.cat(scores)

    def _of_head(
        self, keys: Float[Tensor, "S D"], values: Float[Tensor, "S D"], first: int
    ) -> Float[Tensor, " S"]:
        """Below 1 for what is compared, infinite for sinks; the rest by age, the latest highest."""
        lag = self._lag(len(keys)) if self.lag is None else self.lag
        indices = torch.arange(len(keys), device=keys.device)
        scores = 1 + indices / max(len(keys), 1)
        scores[:first] = torch.inf
        compared = (len(keys) - first) // lag - 1  # partitions
        if compared > 0:
            span = slice(first, first + compared * lag)
            scores[span] = (
                (self._shares(keys[first:], lag) + self._shares(values[first:], lag)) / 2
            ).flatten()
            if self.within is Within.PARTITION:
                scores[span] = _ranks(scores[span].view(-1, lag)).flatten()
        return scores

    def _lag(self, entries: int) -> int:
        """The lag that follows from how many entries of a head there is room for."""
        room = entries - self.sinks
        return max(2, min(MOST_LAG, room // 8, max(32, room // 32)))

    def _shares(self, states: Float[Tensor, "S D"], lag: int) -> Float[Tensor, "P lag"]:
        """Each entry's share of its partition, for all partitions that have a next one.

        Args:
            states: keys or values from the first partition on.
        """
        count = len(states) // lag
        cut = states[: count * lag].float()
        parts = cut.view(count, lag, -1)
        low, high = parts[1:].amin(1, keepdim=True), parts[1:].amax(1, keepdim=True)
        width = torch.where(high > low, high - low, 1.0)
        return ((parts[:-1] - low) / width).std(-1).softmax(-1)


def _ranks(scores: Float[Tensor, "P lag"]) -> Float[Tensor, "P lag"]:
    """Ranks of scores in their partition, from 0 to below 1; of equal ranks the score decides."""
    order = torch.sort(scores, dim=-1, stable=True).indices
    return (order.argsort(-1) + scores) / scores.shape[-1]


Part = LagKV
