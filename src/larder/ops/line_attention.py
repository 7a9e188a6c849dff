"""Attention along lines: some keys (verticals) and some distances back (slashes) of a query head.

Li et al., "LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn
Dialogues" (2025), arXiv:2507.13681: while an input is read, each query head attends along the lines
that cover a share of its attention. The attention of sampled queries is computed in full; lines are
taken greedily, the one with the most weight that no former line covers, until the share is reached.
Products are then computed along the lines alone.

No released code was found. Inferred: queries are sampled evenly, the last one among them, and every
query attends to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import pad

SAMPLED_QUERIES = 32  # whose attention lines are chosen by
CHUNK = 64  # queries whose keys along slashes are in memory at a time
TOLERANCE = 1e-6  # of a share, for the rounding of sums

KeyedHead = tuple[Float[Tensor, "S D"], Float[Tensor, "S D"], Int64[Tensor, " S"]]


@dataclass(frozen=True)
class AttentionLines:
    """Lines that a query head attends along.

    Args:
        verticals: indices of keys, ascending.
        slashes: distances from a query back to a key, ascending.
    """

    verticals: Int64[Tensor, " V"]
    slashes: Int64[Tensor, " N"]

    def mask(
        self, positions: Int64[Tensor, " Q"], key_positions: Int64[Tensor, " S"]
    ) -> Bool[Tensor, "Q S"]:
        """Pairs of queries and keys on a line."""
        distances = positions[:, None] - key_positions
        is_vertical = torch.isin(
            torch.arange(len(key_positions), device=distances.device), self.verticals
        )
        return (distances >= 0) & (is_vertical | torch.isin(distances, self.slashes))


def line_attention(
    queries: Float[Tensor, "H Q D"],
    heads: Sequence[KeyedHead],
    positions: Int64[Tensor, " Q"],
    scaling: float,
    coverage: float,
) -> tuple[Float[Tensor, "H Q D"], Float[Tensor, "H Q"]]:
    """Output and log-sum-exp, in float32, along lines that are chosen for each query head.

    Args:
        heads: keys, values and true positions of each kv head, in order of positions, the new
            tokens' own among them.
        positions: true positions of the queries, ascending.
        coverage: share of the attention of sampled queries that the lines cover.
    """
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for group, (keys, values, key_positions) in zip(
        queries.unflatten(0, (len(heads), -1)), heads, strict=True
    ):
        lines = head_lines(group, keys, positions, key_positions, scaling, coverage)
        for query, line in zip(group, lines, strict=True):
            parts = [
                _attend(some, keys, values, at, key_positions, line, scaling)
                for some, at in zip(query.split(CHUNK), positions.split(CHUNK), strict=True)
            ]
            outs.append(torch.cat([out for out, _ in parts]))
            lses.append(torch.cat([lse for _, lse in parts]))
    return torch.stack(outs), torch.stack(lses)


def head_lines(
    queries: Float[Tensor, "R Q D"],
    keys: Float[Tensor, "S D"],
    positions: Int64[Tensor, " Q"],
    key_positions: Int64[Tensor, " S"],
    scaling: float,
    coverage: float,
) -> list[AttentionLines]:
    """Lines of each query head of a group, by the attention of sampled queries."""
    last = queries.shape[1] - 1
    count = min(SAMPLED_QUERIES, last + 1)
    rows = torch.linspace(0, last, count, dtype=torch.float64).round().long().to(keys.device)
    distances = positions[rows, None] - key_positions  # [N, S]
    logits = queries[:, rows].float() @ keys.float().T * scaling
    weights = logits.double().masked_fill(distances < 0, -torch.inf).softmax(-1)
    return choose_lines(weights, distances, coverage)


def choose_lines(
    weights: Float[Tensor, "R N S"], distances: Int64[Tensor, "N S"], coverage: float
) -> list[AttentionLines]:
    """Lines that cover a share of each head's weights, the ones of most weight first.

    Of equals the earlier key is taken, before any distance, then the smaller distance.

    Args:
        distances: from each query back to each key; negative where it is not seen.
    """
    candidates = _LineCandidates(weights, distances)
    wanted = coverage * weights.sum((1, 2)) * (1 - TOLERANCE)
    picks = torch.full((len(weights),), candidates.num_columns, device=weights.device)  # distance 0
    for _ in range(candidates.weights.shape[1]):
        is_open = candidates.covered < wanted
        if not bool(is_open.any()):
            break
        candidates.take(picks, is_open)
        picks = candidates.weights.masked_fill(candidates.is_taken, -torch.inf).argmax(1)
    return candidates.lines()


class _LineCandidates:
    """Weights on the lines of a group of query heads that no line taken so far covers.

    Lines are numbered: the keys, one column of padding, then the distances.
    """

    def __init__(self, weights: Float[Tensor, "R N S"], distances: Int64[Tensor, "N S"]) -> None:
        heads, _, keys = weights.shape
        self.num_columns = keys + 1
        self._rest = pad(weights, (0, 1))  # [R, N, S + 1]
        self._back = pad(distances.clamp(min=0), (0, 1))  # [N, S + 1]
        num_slashes = int(self._back.max()) + 1
        slashes = weights.new_zeros(heads, num_slashes)
        slashes.scatter_add_(1, self._back.flatten().expand(heads, -1), self._rest.flatten(1))
        self.weights = torch.cat([self._rest.sum(1), slashes], 1)
        self._keys_at = _keys_at(distances, num_slashes)
        self.is_taken = torch.zeros_like(self.weights, dtype=torch.bool)
        self.covered = weights.new_zeros(heads)

    def take(self, picks: Int64[Tensor, " R"], is_open: Bool[Tensor, " R"]) -> None:
        """Take a line for each open head."""
        self.is_taken[is_open.nonzero().flatten(), picks[is_open]] = True
        is_column = picks < self.num_columns
        along = self._keys_at[:, (picks - self.num_columns).clamp(min=0)].T  # [R, N]
        columns = torch.where(is_column[:, None], picks[:, None], along)
        found = self._rest.gather(2, columns[..., None]).squeeze(2) * is_open[:, None]
        back = self._back.expand(len(picks), -1, -1).gather(2, columns[..., None]).squeeze(2)
        self._rest.scatter_add_(2, columns[..., None], -found[..., None])
        self.weights.scatter_add_(1, columns, -found)
        self.weights.scatter_add_(1, self.num_columns + back, -found)
        self.covered += found.sum(1)

    def lines(self) -> list[AttentionLines]:
        """Lines of each head."""
        split = self.num_columns
        return [
            AttentionLines(own[: split - 1].nonzero().flatten(), own[split:].nonzero().flatten())
            for own in self.is_taken
        ]


def _keys_at(distances: Int64[Tensor, "N S"], num_slashes: int) -> Int64[Tensor, "N O"]:
    """Index of the key at each distance from each query; S where there is none."""
    rows, keys = (distances >= 0).nonzero(as_tuple=True)
    found = distances.new_full((len(distances), num_slashes), distances.shape[1])
    found[rows, distances[rows, keys]] = keys
    return found


def _attend(
    queries: Float[Tensor, "Q D"],
    keys: Float[Tensor, "S D"],
    values: Float[Tensor, "S D"],
    positions: Int64[Tensor, " Q"],
    key_positions: Int64[Tensor, " S"],
    lines: AttentionLines,
    scaling: float,
) -> tuple[Float[Tensor, "Q D"], Float[Tensor, " Q"]]:
    """Attention of one query head along its lines; a key on both kinds counts once."""
    queries, columns = queries.float(), lines.verticals
    is_hidden = key_positions[columns] > positions[:, None]
    direct = (queries @ keys[columns].float().T).masked_fill(is_hidden, -torch.inf)
    wanted = positions[:, None] - lines.slashes  # [Q, N]
    rows = torch.searchsorted(key_positions, wanted).clamp(max=len(keys) - 1)
    is_vertical = torch.zeros_like(key_positions, dtype=torch.bool)
    is_vertical[columns] = True
    is_missing = (key_positions[rows] != wanted) | is_vertical[rows]
    along = torch.einsum("qd,qnd->qn", queries, keys[rows].float())
    logits = torch.cat([direct, along.masked_fill(is_missing, -torch.inf)], 1) * scaling
    lse = logits.logsumexp(1)
    weights = (logits - lse[:, None]).exp()
    out = weights[:, : len(columns)] @ values[columns].float()
    return out + torch.einsum("qn,qnd->qd", weights[:, len(columns) :], values[rows].float()), lse
