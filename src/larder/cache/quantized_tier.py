"""Quantized tier of a layer: entries of one grade of precision, in groups.

    row      0 1 2 3 | 4 5 6 | 7 8 9 10 | ...      entries of a group in order of position
    lengths  (head, 4) (head, 3) (head, 4)         groups of a head in any order

A tier is immutable: a change makes a new one, so a change that fails has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import count

import torch
from jaxtyping import Float, Float64, Int32, Int64
from torch import Tensor

from larder.cache.memory_usage import storage_bytes
from larder.cache.spec import with_prefix
from larder.core.codec import Codec, Grid, ScaleGranularity
from larder.core.part import Ledger
from larder.ops.packing import starts_of
from larder.ops.quantization import QuantizedRows, quantize_rows
from larder.ops.quantized_attention import QuantizedKV

GRIDS = tuple(Grid)  # by their number in saved states
BY_ENTRY = 1.0  # keys share offsets and scales among the channels of an entry


@dataclass(frozen=True)
class QuantizedTier:
    """Quantized entries of all heads of a layer at one grade.

    Args:
        positions: true positions [T].
        columns: ledger columns, one number per row [n, T].
    """

    codec: Codec
    rows: QuantizedKV
    positions: Int32[Tensor, " T"]
    columns: Float[Tensor, "n T"]

    @staticmethod
    def nothing(codec: Codec, like: Tensor, num_columns: int) -> QuantizedTier:
        """Empty tier; residual numbers have the dtype of `like`, whose last size is D."""
        head_dim = like.shape[-1]
        keys = QuantizedRows.nothing(codec.keys(head_dim), like[:0])
        values = QuantizedRows.nothing(codec.values(head_dim), like[:0])
        rows = QuantizedKV(keys, values, torch.zeros(0, 2, dtype=torch.int32))
        none = like.new_zeros(num_columns, 0, dtype=torch.float32)
        return QuantizedTier(codec, rows, none.new_zeros(0, dtype=torch.int32), none)

    def __len__(self) -> int:
        return len(self.positions)

    def lengths(self, heads: int) -> Int64[Tensor, " K"]:
        """Entries of each kv head."""
        owners, counts = self.rows.lengths.long().unbind(1)
        return torch.zeros(heads, dtype=torch.int64).index_add_(0, owners, counts)

    def select(self, rows: Int64[Tensor, " N"]) -> QuantizedTier:
        """Tier with only these rows (ascending), bit for bit; groups without rows are removed."""
        counts = torch.bincount(self.rows.groups_of(rows), minlength=len(self.rows.lengths))
        groups = counts.nonzero().flatten()
        lengths = torch.stack([self.rows.lengths[groups, 0], counts[groups].int()], dim=1)
        keys = self.rows.keys.select(rows, groups)
        kept = QuantizedKV(keys, self.rows.values.select(rows, groups), lengths)
        there = rows.to(self.positions.device)
        return QuantizedTier(self.codec, kept, self.positions[there], self.columns[:, there])

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, ledger columns excluded."""
        named = {"positions": self.positions, "lengths": self.rows.lengths}
        for side, numbers in (("keys", self.rows.keys), ("values", self.rows.values)):
            named |= {f"{side}.{name}": tensor for name, tensor in numbers.tensors().items()}
        return named

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor."""
        return storage_bytes((*self.tensors().values(), self.columns))

    def state(self, ledger: Ledger) -> dict[str, Tensor]:
        """Copies of all tensors by name, codec and ledger columns included."""
        columns = zip(ledger.columns, self.columns, strict=True)
        named = self.tensors() | {f"column.{name}": column for name, column in columns}
        named = {name: tensor.clone() for name, tensor in named.items()}
        return named | {"codec": codec_to_tensor(self.codec)}

    @staticmethod
    def adopt(state: Mapping[str, Tensor], ledger: Ledger, head_dim: int) -> QuantizedTier:
        """Tier restored from `state`, which takes ownership of the tensors."""
        codec = codec_from_tensor(state["codec"])
        keys = QuantizedRows.adopt(codec.keys(head_dim), with_prefix("keys.", state))
        values = QuantizedRows.adopt(codec.values(head_dim), with_prefix("values.", state))
        positions = state["positions"]
        columns = torch.zeros(len(ledger.columns), len(positions), device=positions.device)
        for index, name in enumerate(ledger.columns):
            columns[index] = state[f"column.{name}"]
        return QuantizedTier(codec, QuantizedKV(keys, values, state["lengths"]), positions, columns)


@dataclass(frozen=True)
class EncodingBatch:
    """Entries to encode, in order of heads and positions.

    Args:
        heads: kv head of each entry, in host memory.
    """

    keys: Float[Tensor, "N D"]
    values: Float[Tensor, "N D"]
    positions: Int32[Tensor, " N"]
    heads: Int64[Tensor, " N"]


def encode_tier(
    codec: Codec,
    pool: EncodingBatch,
    counts: Int64[Tensor, " G"],
    weights: Float[Tensor, "K D1"],
    dtype: torch.dtype,
    num_columns: int,
) -> QuantizedTier:
    """New tier of groups with `counts` entries each; its columns are zero.

    Args:
        weights: of the key channels of each head [K, D], or empty.
        dtype: of numbers that are not quantized.

    Raises:
        CacheError: a number to quantize exceeds float16.
    """
    owners = pool.heads[starts_of(counts)]
    importance = weights[owners.to(weights.device)] if len(weights) else weights
    head_dim = pool.keys.shape[1]
    keys = quantize_rows(pool.keys, counts, codec.keys(head_dim), importance, dtype)
    values = quantize_rows(pool.values, counts, codec.values(head_dim), weights[:0], dtype)
    lengths = torch.stack([owners, counts], dim=1).int()
    columns = pool.keys.new_zeros(num_columns, len(pool.heads), dtype=torch.float32)
    return QuantizedTier(codec, QuantizedKV(keys, values, lengths), pool.positions, columns)


def concat_tiers(tiers: Sequence[QuantizedTier]) -> QuantizedTier:
    """Concatenation of tiers of one codec, group by group."""
    if len(tiers) == 1:
        return tiers[0]
    rows = QuantizedKV.concat([tier.rows for tier in tiers])
    positions = torch.cat([tier.positions for tier in tiers])
    return QuantizedTier(
        tiers[0].codec, rows, positions, torch.cat([t.columns for t in tiers], dim=1)
    )


def saved_codecs(state: Mapping[str, Tensor]) -> tuple[Codec, ...]:
    """Codecs of grades 1, 2, ... of a saved layer; empty for layers without quantized tiers."""
    return tuple(codec_from_tensor(tier["codec"]) for tier in saved_tiers(state))


def saved_tiers(state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """State of each quantized tier of a saved layer."""
    for grade in count(1):
        tier_state = with_prefix(tier_prefix(grade), state)
        if not tier_state:
            return
        yield tier_state


def tier_prefix(grade: int) -> str:
    """Prefix of the names of a tier's tensors in the state of its layer."""
    return f"grade{grade}."


def codec_to_tensor(codec: Codec) -> Float64[Tensor, " N"]:
    """Saved state of a codec; granularity and levels last, and only where they are not usual."""
    *numbers, key_scales, key_grid, value_grid = astuple(codec)
    grids = [GRIDS.index(key_grid), GRIDS.index(value_grid)]
    if key_scales is not ScaleGranularity.CHANNEL or any(grids):
        numbers.append(BY_ENTRY if key_scales is not ScaleGranularity.CHANNEL else 0.0)
    if any(grids):
        numbers += grids
    return torch.tensor(numbers, dtype=torch.float64)


def codec_from_tensor(numbers: Float64[Tensor, " N"]) -> Codec:
    """Codec of a tier's saved state."""
    key_bits, value_bits, group, outliers, channels, balance, *rest = numbers.tolist()
    by_entry, *grids = rest or [0.0]
    key_scales = ScaleGranularity.ENTRY if by_entry else ScaleGranularity.CHANNEL
    sizes = int(key_bits), int(value_bits), int(group)
    key_grid, value_grid = (GRIDS[int(grid)] for grid in grids or (0, 0))
    return Codec(*sizes, outliers, channels, balance, key_scales, key_grid, value_grid)
