"""Directions that two layers share: unit vectors as they are, or quantized in groups of a head.

Quantized directions follow the rules of a graded layer's tiers: a group keeps its codes until less
than half of it is left, then its rows are encoded again with those that come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.cache.forms._graded_tiers import NO_WEIGHTS, group_sizes, rows_to_reencode
from larder.cache.quantized_tier import (
    EncodingBatch,
    QuantizedTier,
    codec_to_tensor,
    concat_tiers,
    encode_tier,
)
from larder.cache.row_updates import HEAD_STRIDE
from larder.cache.spec import with_prefix
from larder.core.codec import Codec
from larder.core.part import Ledger

CODED = "coded."  # prefix of the names of quantized directions
Sides = tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]


class Directions(ABC):
    """Directions of keys and values, immutable, in rows."""

    @abstractmethod
    def decoded(self, rows: Int64[Tensor, " N"]) -> Sides:
        """Float32 directions of keys and of values of some distinct rows."""

    @abstractmethod
    def select(self, rows: Int64[Tensor, " N"]) -> Directions:
        """Some rows, ascending."""

    @abstractmethod
    def joined(
        self, held: Int64[Tensor, " N"], coming: EncodingBatch
    ) -> tuple[Directions, Int64[Tensor, " M"], Tensor]:
        """Directions with more rows, in a new order.

        Args:
            held: rank of each held row, by head and position.
            coming: float32 unit vectors, in order of heads and positions.

        Returns:
            The directions; the former row of each row, where those that come follow the held ones;
            and what the norms of keys and of values are to be multiplied by [2, N], so that a
            vector keeps its length however its direction was rounded.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""

    def state(self) -> dict[str, Tensor]:
        """Tensors by name from which `adopt_directions` restores them."""
        return self.tensors()


@dataclass(frozen=True)
class ExactDirections(Directions):
    """Directions in the dtype of the cache."""

    keys: Float[Tensor, "N D"]
    values: Float[Tensor, "N D"]

    def decoded(self, rows: Int64[Tensor, " N"]) -> Sides:
        return self.keys[rows].float(), self.values[rows].float()

    def select(self, rows: Int64[Tensor, " N"]) -> ExactDirections:
        return ExactDirections(self.keys[rows], self.values[rows])

    def joined(
        self, held: Int64[Tensor, " N"], coming: EncodingBatch
    ) -> tuple[Directions, Int64[Tensor, " M"], Tensor]:
        ranks = coming.heads.to(held.device) * HEAD_STRIDE + coming.positions
        order = torch.cat([held, ranks]).argsort()
        keys, values = (
            torch.cat([mine, new.to(mine.dtype)])[order]
            for mine, new in ((self.keys, coming.keys), (self.values, coming.values))
        )
        return ExactDirections(keys, values), order, torch.ones(2, len(order), device=held.device)

    def tensors(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values}


@dataclass(frozen=True)
class CodedDirections(Directions):
    """Quantized directions, by head in groups."""

    tier: QuantizedTier

    def decoded(self, rows: Int64[Tensor, " N"]) -> Sides:
        keys, values = self.tier.rows.decoded(rows.cpu())
        return keys.float(), values.float()

    def select(self, rows: Int64[Tensor, " N"]) -> CodedDirections:
        return CodedDirections(self.tier.select(rows.cpu()))

    def joined(
        self, held: Int64[Tensor, " N"], coming: EncodingBatch
    ) -> tuple[Directions, Int64[Tensor, " M"], Tensor]:
        tier, rows = self.tier, torch.arange(len(self.tier))
        kv_heads = int(torch.cat([tier.rows.heads(), coming.heads]).max()) + 1
        is_pooled = rows_to_reencode(tier, rows, coming.heads, kv_heads)
        stays, again = rows[~is_pooled], rows[is_pooled]
        pool, turn = self._pool(again, coming)
        counts = group_sizes(pool.heads, tier.codec.group)
        coded = encode_tier(tier.codec, pool, counts, NO_WEIGHTS, torch.float32, 0)
        new = torch.cat([again, len(tier) + torch.arange(len(coming.heads))])[turn]
        factors = torch.cat([pool.keys.new_ones(2, len(stays)), _length_ratios(pool, coded)], dim=1)
        after = CodedDirections(concat_tiers([tier.select(stays), coded]))
        return after, torch.cat([stays, new]).to(held.device), factors

    def _pool(
        self, again: Int64[Tensor, " N"], coming: EncodingBatch
    ) -> tuple[EncodingBatch, Int64[Tensor, " M"]]:
        """Rows that are encoded, in order of heads and positions, and their former places."""
        keys, values = self.decoded(again)
        there = again.to(coming.positions.device)
        heads = torch.cat([self.tier.rows.heads()[again], coming.heads])
        positions = torch.cat([self.tier.positions[there], coming.positions])
        turn = (heads * HEAD_STRIDE + positions.cpu()).argsort()
        rows = turn.to(positions.device)
        keys, values = (
            torch.cat([keys, coming.keys])[rows],
            torch.cat([values, coming.values])[rows],
        )
        return EncodingBatch(keys, values, positions[rows], heads[turn]), turn

    def tensors(self) -> dict[str, Tensor]:
        return {f"{CODED}{name}": tensor for name, tensor in self.tier.tensors().items()}

    def state(self) -> dict[str, Tensor]:
        return self.tensors() | {f"{CODED}codec": codec_to_tensor(self.tier.codec)}


def _length_ratios(meant: EncodingBatch, coded: QuantizedTier) -> Float[Tensor, "2 N"]:
    """Lengths of vectors by those of the ones that their codes decode to, keys and values."""
    found = coded.rows.decoded(torch.arange(len(coded)))
    lengths = [side.norm(dim=-1) for side in (meant.keys, meant.values)]
    decoded = [side.norm(dim=-1) for side in found]
    pairs = zip(lengths, decoded, strict=True)
    return torch.stack([length / other.masked_fill(other == 0, 1.0) for length, other in pairs])


def no_directions(like: Float[Tensor, "_ D"], codec: Codec | None) -> Directions:
    """No rows, quantized if there is a codec."""
    if codec is None:
        return ExactDirections(like[:0].clone(), like[:0].clone())
    return CodedDirections(QuantizedTier.nothing(codec, like, 0))


def adopt_directions(state: Mapping[str, Tensor], head_dim: int) -> Directions:
    """Directions from their `state`, which takes ownership of the tensors."""
    coded = with_prefix(CODED, state)
    if coded:
        return CodedDirections(QuantizedTier.adopt(coded, Ledger(), head_dim))
    return ExactDirections(state["keys"], state["values"])
