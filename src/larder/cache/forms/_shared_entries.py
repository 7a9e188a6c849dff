"""Shared entries of a layer pair: one direction for both layers, a norm for each.

Liu et al., "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models" (2024),
arXiv:2405.14366, section 4. Keys and values are directions times norms; in the deeper half of a
model the directions of neighboring layers are similar. Implemented from the paper's abstract and
secondary accounts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int16, Int32, Int64
from torch import Tensor

from larder.cache.forms._shared_directions import Directions, adopt_directions, no_directions
from larder.cache.forms.base import AttentionState
from larder.cache.memory_usage import storage_bytes
from larder.cache.quantized_tier import EncodingBatch
from larder.cache.row_updates import HEAD_STRIDE
from larder.core.codec import Codec
from larder.core.observation import Entries
from larder.core.spec import LayerSpec
from larder.core.types import Queries
from larder.ops.attention import ragged_attention

LOWER, UPPER = 0, 1
NUMBERS = ("norms", "heads", "positions", "held", "columns")  # fields beside the directions
STRAIGHT = 1e-4  # below this sine two directions are one, or opposite
ALL_ALIKE = 1e-6  # radians between the least and the greatest angle that are rounding errors


@dataclass(frozen=True)
class SharingCandidates:
    """Same entries in two layers, before they are shared.

    Args:
        keys, values: of the lower and of the upper layer.
        columns: ledger columns of either layer [2, n, N].
    """

    keys: tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]
    values: tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]
    heads: Int16[Tensor, " N"]
    positions: Int32[Tensor, " N"]
    columns: Float[Tensor, "2 n N"]


@dataclass(frozen=True)
class SharedEntries:
    """Shared entries of a pair, immutable. Exact ones are in order of heads, then of positions;
    quantized ones are so in each group.

    Args:
        directions: of keys and values.
        norms: of keys and values in the lower and the upper layer [2, 2, N]: layer, then kind.
        heads: of each row.
        held: mask of the rows that each layer still holds [2, N]; rows of neither are removed.
        columns: ledger columns [2, n, N].
    """

    directions: Directions
    norms: Float[Tensor, "2 2 N"]
    heads: Int16[Tensor, " N"]
    positions: Int32[Tensor, " N"]
    held: Bool[Tensor, "2 N"]
    columns: Float[Tensor, "2 n N"]

    @staticmethod
    def nothing(
        like: Float[Tensor, "_ D"], num_columns: int, codec: Codec | None = None
    ) -> SharedEntries:
        """No entry; directions will be quantized if there is a codec."""
        numbers = like.new_zeros(0, dtype=torch.float32)
        return SharedEntries(
            no_directions(like, codec),
            numbers.new_zeros(2, 2, 0),
            torch.zeros(0, dtype=torch.int16, device=like.device),
            torch.zeros(0, dtype=torch.int32, device=like.device),
            torch.zeros(2, 0, dtype=torch.bool, device=like.device),
            numbers.new_zeros(2, num_columns, 0),
        )

    def __len__(self) -> int:
        return len(self.heads)

    def rows(self, side: int) -> Int64[Tensor, " N"]:
        """Rows that a layer holds."""
        return self.held[side].nonzero().flatten()

    def counts(self, side: int, kv_heads: int) -> Int64[Tensor, " K"]:
        """Rows that a layer holds per kv head, in host memory."""
        return torch.bincount(self.heads[self.held[side]], minlength=kv_heads).cpu()

    def decoded(self, side: int, rows: Int64[Tensor, " N"]) -> tuple[Tensor, Tensor]:
        """Float32 keys and values of a layer."""
        key, value = self.norms[side][:, rows].unsqueeze(-1)
        keys, values = self.directions.decoded(rows)
        return keys * key, values * value

    def attend(
        self, side: int, queries: Queries, layer: LayerSpec, column: int | None
    ) -> AttentionState:
        """Attention of a layer's queries to the rows that it holds, one kv head at a time.

        Args:
            column: index of the ledger column that biases attention; None if there is none.
        """
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for head, group in enumerate(queries.unflatten(0, (layer.kv_heads, -1))):
            rows = (self.held[side] & (self.heads == head)).nonzero().flatten()
            bias = None if column is None else self.columns[side, column, rows]
            layout = torch.zeros(1, dtype=torch.int64), torch.tensor([len(rows)])
            numbers = *self.decoded(side, rows), *layout, layer.scaling, bias
            out, lse = ragged_attention(group, *numbers, softcap=layer.softcap)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def select(
        self, side: int, rows: Int64[Tensor, " N"], columns: Float[Tensor, "n N"]
    ) -> SharedEntries:
        """Shared entries after a layer keeps only these rows, with these columns."""
        held, numbers = self.held.clone(), self.columns.clone()
        held[side] = False
        held[side, rows] = True
        numbers[side][:, rows] = columns
        return replace(self, held=held, columns=numbers)._selected(held.any(0).nonzero().flatten())

    def joined(self, candidates: SharingCandidates, weight: float) -> SharedEntries:
        """Shared entries with more rows, which both layers hold.

        Args:
            weight: of the upper layer's direction.
        """
        pairs = candidates.keys, candidates.values
        keys, values = (slerp(*pair, weight) for pair in pairs)
        coming = EncodingBatch(keys, values, candidates.positions, candidates.heads.long().cpu())
        held = self.heads.long() * HEAD_STRIDE + self.positions
        directions, order, factors = self.directions.joined(held, coming)
        norms = torch.stack(
            [torch.stack([pair[side].float().norm(dim=-1) for pair in pairs]) for side in (0, 1)]
        )
        return SharedEntries(
            directions,
            torch.cat([self.norms, norms], dim=2)[..., order] * factors,
            torch.cat([self.heads, candidates.heads])[order],
            torch.cat([self.positions, candidates.positions])[order],
            torch.cat([self.held, self.held.new_ones(2, len(candidates.heads))], dim=1)[:, order],
            torch.cat([self.columns, candidates.columns], dim=2)[..., order],
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return self.directions.tensors() | {name: getattr(self, name) for name in NUMBERS}

    def state(self) -> dict[str, Tensor]:
        """Copies of all tensors by name, from which `adopt` restores them."""
        named = self.directions.state() | {name: getattr(self, name) for name in NUMBERS}
        return {name: tensor.clone() for name, tensor in named.items()}

    @staticmethod
    def adopt(state: Mapping[str, Tensor], head_dim: int) -> SharedEntries:
        """Shared entries from their `state`, which takes ownership of the tensors."""
        return SharedEntries(
            adopt_directions(state, head_dim), **{name: state[name] for name in NUMBERS}
        )

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor."""
        return storage_bytes(self.tensors().values())

    def _selected(self, rows: Int64[Tensor, " N"]) -> SharedEntries:
        return SharedEntries(
            self.directions.select(rows),
            self.norms[..., rows],
            self.heads[rows],
            self.positions[rows],
            self.held[:, rows],
            self.columns[..., rows],
        )


def angles(one: Float[Tensor, "N D"], other: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    """Radians between pairs of vectors, in [0, pi], in float64; pi / 2 to a zero vector."""
    return (_unit(one) * _unit(other)).sum(-1).clamp(-1.0, 1.0).acos()


def slerp(
    one: Float[Tensor, "N D"], other: Float[Tensor, "N D"], weight: float
) -> Float[Tensor, "N D"]:
    """Float32 unit vectors between the directions of pairs of vectors.

    Args:
        weight: 0 gives the direction of `one`, 1 that of `other`.
    """
    angle = angles(one, other)[:, None]
    sine = angle.sin()
    is_straight = sine < STRAIGHT
    safe = sine.masked_fill(is_straight, 1.0)
    first = torch.where(is_straight, 1 - weight, ((1 - weight) * angle).sin() / safe)
    second = torch.where(is_straight, weight, (weight * angle).sin() / safe)
    return _unit(first * _unit(one) + second * _unit(other)).float()


def _unit(vectors: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    return torch.nn.functional.normalize(vectors.double(), dim=-1)


@dataclass(frozen=True)
class SharingRequest:
    """Own entries that a layer requests to share: packed rows, and identifiers of the entries."""

    rows: Int64[Tensor, " N"]
    names: Int64[Tensor, " N"]

    @staticmethod
    def none() -> SharingRequest:
        nothing = torch.zeros(0, dtype=torch.int64)
        return SharingRequest(nothing, nothing)


@dataclass(frozen=True)
class PairedOrder:
    """All entries of a layer: its own, then its shared ones; in host memory.

    Args:
        own: number of own entries.
        indices: of the entries in packed order.
    """

    heads: Int64[Tensor, " T"]
    positions: Int64[Tensor, " T"]
    own: int
    indices: Int64[Tensor, " T"]

    @property
    def ranks(self) -> Int64[Tensor, " T"]:
        """Identifiers of the entries, which ascend in packed order."""
        return self.heads * HEAD_STRIDE + self.positions


def requested_by_both(
    one: SharingRequest, other: SharingRequest
) -> tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]]:
    """Rows, in either layer, of the entries that both request."""
    mine = torch.isin(one.names, other.names)
    theirs = torch.isin(other.names, one.names)
    return one.rows[mine], other.rows[theirs]


def sharing_candidates(
    held: tuple[Entries, Entries], lower: Int64[Tensor, " N"], upper: Int64[Tensor, " N"]
) -> SharingCandidates:
    keys: list[Tensor] = []
    values: list[Tensor] = []
    columns: list[Tensor] = []
    for entries, rows in zip(held, (lower, upper), strict=True):
        there = rows.to(entries.keys.device)
        keys.append(entries.pack(entries.keys)[there])
        values.append(entries.pack(entries.values)[there])
        columns.append(entries.packed_columns()[:, there])
    device, counts = held[0].keys.device, torch.tensor(held[0].lengths)
    heads = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int16), counts)
    positions = held[0].packed_positions()[lower.to(device)].int()
    return SharingCandidates(
        (keys[0], keys[1]),
        (values[0], values[1]),
        heads[lower].to(device),
        positions,
        torch.stack(columns),
    )


def similar_directions(candidates: SharingCandidates, apart: float) -> Bool[Tensor, " N"]:
    """Mask of the entries to share: not those in the upper part of the range of angles.

    Keys and values both count. A single entry, or entries of equal angles, are all shared.
    """
    alike = torch.ones(len(candidates.heads), dtype=torch.bool, device=candidates.keys[0].device)
    for lower, upper in (candidates.keys, candidates.values):
        angle = angles(lower, upper)
        if len(angle):
            least, most = angle.min(), angle.max()
            alike &= (angle <= most - apart * (most - least)) | (most - least < ALL_ALIKE)
    return alike
