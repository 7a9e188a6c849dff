"""Scorer by attention from the queries of the latest tokens (MorphKV).

Ghadia et al., "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs"
(2025), arXiv:2503.00979 (MorphKV): the last R tokens stay, and of the older ones those that the
queries of these R look at most. Each query's weights are taken among the older entries alone; of
the query heads that share a kv head the highest counts; over the queries they are summed, or the
highest counts. The queries themselves are held, R vectors for each query head of a layer, so that
older queries do not count.

While text is generated the newest token is not among the R: it stays beside them, and has its say
at the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import LatestQueries, Observation, Phase
from larder.core.part import LOG_COUNT, Ledger
from larder.core.types import Packed, WeightChunk
from larder.ops.attention import sink_logits
from larder.ops.column_statistics import reduce_columns
from larder.policy.protect import ProtectedTokens
from larder.policy.scorers.base import Scorer


class Fusion(Enum):
    """Reduction over the latest queries."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True)
class Morph(Scorer):
    """Attention from the latest queries only.

    Args:
        window: R, the queries that judge, in tokens. They always stay themselves.
        fusion: `sum` or `max` over the queries; the released scripts take `max`.
    """

    window: int = 32
    fusion: Fusion = Fusion.MAX

    def __post_init__(self) -> None:
        require(self.window >= 1, "morph.window", "at least 1 token", self.window)

    def required_ledger(self) -> Ledger:
        return Ledger(queries=self.window)

    def protected_tokens(self) -> ProtectedTokens:
        """The window, and the newest token beside it while text is generated."""
        return ProtectedTokens(last=self.window + 1)

    def score(self, observation: Observation) -> Packed:
        judges = self._judges(observation)
        start = observation.length - self.window - self._newest(observation)
        older = observation.entries.position_range(0, max(start, 0))
        heads = reduce_columns(
            _FusedQueries(self.fusion),
            judges.queries,
            older.keys,
            *older.layout,
            observation.layer.scaling,
            bias=older.columns.get(LOG_COUNT),
            softcap=observation.layer.softcap,
            sinks=sink_logits(observation.layer, older.keys),
        )
        pairs = zip(heads, observation.entries.lengths, strict=True)
        return torch.cat([_with_window(head[0], length) for head, length in pairs])

    def _judges(self, observation: Observation) -> LatestQueries:
        """The last queries, without that of the newest token while text is generated."""
        latest = LatestQueries(observation.queries, observation.query_positions)
        if observation.latest is not None:
            latest = observation.latest.extended(latest)
        return latest.before(observation.length - self._newest(observation)).last(self.window)

    def _newest(self, observation: Observation) -> int:
        return int(observation.phase is Phase.DECODE)


@dataclass(frozen=True)
class _FusedQueries:
    """Gathers one number per entry: the highest of the query heads, joined over queries."""

    fusion: Fusion

    def start(self, like: Float[Tensor, "R S"]) -> tuple[Tensor, ...]:
        return (like.new_zeros(1, like.shape[1]),)

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        highest = weights.amax(0)  # [c, S]
        if self.fusion is Fusion.SUM:
            state[0].add_(highest.sum(0))
        else:
            torch.maximum(state[0], highest.amax(0), out=state[0])

    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "1 S"]:
        return state[0]


def _with_window(older: Float[Tensor, " O"], length: int) -> Float[Tensor, " S"]:
    """A head's scores: what stands behind the older entries stays."""
    return torch.nn.functional.pad(older, (0, length - len(older)), value=torch.inf)


Part = Morph
