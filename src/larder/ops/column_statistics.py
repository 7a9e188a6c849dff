"""Column statistics of attention weights per cached entry, without the attention matrix.

Every query is normalized by softmax, in float32, over the cached entries of its kv head, as after
prefill. The work is split by kv head and chunks of queries, so that at most two blocks of
R x chunk x S float32 (S of the longest head) are in memory, however many queries there are. With
64 queries such a block stays near the processor's cache; larger chunks measured slower on a CPU.
Statistics carry no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.types import WeightChunk
from larder.ops.attention import NO_SINKS, sink_shares, sinks_by_group

CHUNK = 64  # queries


class GroupReduction(Enum):
    """Reduction of the statistics of the R query heads that share a kv head."""

    MAX = "max"
    SUM = "sum"
    MEAN = "mean"

    def join(self, statistics: Float[Tensor, "R S"]) -> Float[Tensor, " S"]:
        """One number per entry from one per entry and query head."""
        if self is GroupReduction.MAX:
            return statistics.amax(0)
        return statistics.sum(0) if self is GroupReduction.SUM else statistics.mean(0)


@runtime_checkable
class ColumnReducer(Protocol):
    """Reduction of attention weights to a number per query head and entry, chunk by chunk."""

    def start(self, like: Float[Tensor, "R S"]) -> tuple[Tensor, ...]:
        """State before the first query."""
        ...

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        """Update the state in place with queries [first, first + c) of `total`."""
        ...

    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "R S"]:
        """One number per query head and entry."""
        ...


def reduce_columns(
    gather: ColumnReducer,
    queries: Float[Tensor, "H Q D"],
    keys: Float[Tensor, "C D"],
    starts: Int[Tensor, " K"],
    lengths: Int[Tensor, " K"],
    scaling: float,
    *,
    query_positions: Int[Tensor, " Q"] | None = None,
    key_positions: Int[Tensor, " T"] | None = None,
    bias: Float[Tensor, " C"] | None = None,
    judged: Sequence[int] | None = None,
    chunk: int = CHUNK,
    softcap: float | None = None,
    sinks: Float[Tensor, " _"] = NO_SINKS,
) -> list[Float[Tensor, "R _"]]:
    """Result of `gather` over the softmax weights, for each kv head.

    Args:
        query_positions, key_positions: given both, a query sees entries up to its own position
            only, as queries that are themselves in the cache must. key_positions are packed.
        bias: added to the logit of each stored row, in natural log units, finite float32.
        judged: number of entries of each head, the first ones, that `gather` receives; all by
            default. The others still take part in the softmax.
        chunk: queries per chunk, at least 1; changes memory, not results.
        softcap, sinks: as in `ops.attention`.

    Raises:
        BadParameter: `chunk` below 1, or one of the positions without the other.
    """
    positions = _visibility(query_positions, key_positions, chunk)
    groups = queries.detach().unflatten(0, (lengths.shape[0], -1))  # [K, R, Q, D]
    heads: list[Tensor] = []
    packed, total = 0, queries.shape[1]
    shown = lengths.tolist() if judged is None else judged
    own_sinks = sinks_by_group(sinks, lengths.shape[0])
    layout = zip(groups, starts.tolist(), lengths.tolist(), shown, own_sinks, strict=True)
    for group, start, length, width, sink in layout:
        softmax = LogitSoftmax(scaling, softcap, sink)
        span = slice(start, start + length)
        own_keys, own_bias = keys[span].detach().float(), None if bias is None else bias[span]
        visible = None
        if positions is not None:
            visible = positions[0], positions[1][packed : packed + length]
        state, first = gather.start(own_keys.new_zeros(group.shape[0], width)), 0
        for weights in _chunks(group, own_keys, softmax, own_bias, visible, chunk):
            gather.fold(state, weights[..., :width], first, total)
            first += weights.shape[1]
        heads.append(gather.finish(state, total))
        packed += length
    return heads


VisibilityPositions = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class LogitSoftmax:
    """Softmax of one group of query heads: scaling and softcap of logits, and sinks.

    Args:
        sinks: logit of each of the R heads; empty without sinks.
    """

    scaling: float
    softcap: float | None
    sinks: Float[Tensor, " _"]

    def write_weights(self, logits: Float[Tensor, "N S"], out: Float[Tensor, "N S"]) -> None:
        """Write the softmax weights of rows of logits; rows are in order of the heads."""
        torch.softmax(logits, -1, out=out)
        if len(self.sinks):
            heads = logits.logsumexp(-1).view(len(self.sinks), -1)
            out *= sink_shares(heads, self.sinks).view(-1, 1)


def _chunks(
    queries: Float[Tensor, "R Q D"],
    keys: Float[Tensor, "S D"],
    softmax: LogitSoftmax,
    bias: Float[Tensor, " S"] | None,
    positions: VisibilityPositions,
    chunk: int,
) -> Iterator[WeightChunk]:
    """Softmax weights in chunks of queries, in buffers that are reused."""
    num_heads, query_len, head_dim = queries.shape
    if not len(keys):
        return
    buffers = keys.new_empty(2, num_heads * min(chunk, query_len), len(keys))
    for first in range(0, query_len, chunk):
        span = slice(first, min(first + chunk, query_len))
        rows = (queries[:, span].float() * softmax.scaling).reshape(-1, head_dim)
        logits, weights = buffers[0, : len(rows)], buffers[1, : len(rows)]
        torch.mm(rows, keys.T, out=logits)
        if softmax.softcap is not None:
            logits.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
        if bias is not None:
            logits += bias
        grouped = (num_heads, -1, len(keys))
        if positions is None:
            softmax.write_weights(logits, weights)
        else:
            hidden = positions[1] > positions[0][span].unsqueeze(-1)  # [c, S]
            logits.view(grouped).masked_fill_(hidden, -torch.inf)
            softmax.write_weights(logits, weights)
            # A query that sees nothing has a row of NaN so far.
            weights.view(grouped).masked_fill_(hidden, 0.0)
        yield weights.view(grouped)


def _visibility(
    query_positions: Tensor | None, key_positions: Tensor | None, chunk: int
) -> VisibilityPositions:
    require(chunk >= 1, "chunk", "at least 1 query", chunk)
    if query_positions is None and key_positions is None:
        return None
    if query_positions is None or key_positions is None:
        raise BadParameter(
            "query_positions and key_positions must be given together, got one: "
            "give both for a causal statistic, neither where every query sees every entry."
        )
    return query_positions, key_positions
