"""Affine quantization to codes of a fixed number of bits, as `ops.quantization` does it.

Keys share an offset and a scale per channel among the tokens of a group, values among the channels
of a token: Zirui Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache"
(2024), arXiv:2402.02750, section 3.1, with 4 bits, and with 8 (`int8`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import Damaged
from larder.ops.quantization import (
    check_range,
    dequantize,
    pack_codes,
    quantize,
    scales_and_offsets,
    unpack_codes,
)
from larder.store.codecs.base import RowLayout, StorageCodec, TensorRole

GROUP = 64  # tokens, or channels, that share an offset and a scale


class Int4(StorageCodec):
    """Two numbers per byte; one offset and scale for every 64 numbers."""

    bits: ClassVar[int] = 4

    def encode(self, numbers: Float[Tensor, "T D"], rows: RowLayout) -> dict[str, Tensor]:
        check_range(numbers)
        exact = numbers.float()
        lows, highs = (_over_groups(exact, rows, side) for side in ("amin", "amax"))
        offsets, scales = scales_and_offsets(lows, highs, self.bits)
        codes = quantize(
            exact, _repeat_groups(offsets, rows), _repeat_groups(scales, rows), self.bits
        )
        return {"codes": pack_codes(codes, self.bits), "offsets": offsets, "scales": scales}

    def decode(self, coded: Mapping[str, Tensor], rows: RowLayout) -> Float[Tensor, "T D"]:
        codes = unpack_codes(coded["codes"], self.bits, rows.head_dim)
        offsets, scales = (_repeat_groups(coded[name], rows) for name in ("offsets", "scales"))
        if not codes.shape == offsets.shape == scales.shape:
            raise Damaged(
                f"Codes of the shape {tuple(codes.shape)} have offsets of {tuple(offsets.shape)}."
            )
        return dequantize(codes, offsets, scales)


class Int8(Int4):
    """One byte per number; one offset and scale for every 64 numbers."""

    bits: ClassVar[int] = 8


def _over_groups(numbers: Float[Tensor, "T D"], rows: RowLayout, side: str) -> Float[Tensor, "N W"]:
    """Minimum or maximum of each group."""
    if rows.role is TensorRole.VALUES:
        groups = [getattr(group, side)(1) for group in numbers.split(GROUP, 1)]
        return torch.stack(groups, 1)
    groups = [
        getattr(group, side)(0)
        for head in rows.heads()
        for group in numbers[head].split(GROUP)
        if len(group)
    ]
    return torch.stack(groups) if groups else numbers.new_empty(0, rows.head_dim)


def _repeat_groups(shared: Float[Tensor, "N W"], rows: RowLayout) -> Float[Tensor, "T D"]:
    """Per-group values repeated for every number."""
    if rows.role is TensorRole.VALUES:
        return shared.repeat_interleave(GROUP, 1)[:, : rows.head_dim]
    counts = [
        min(GROUP, length - start) for length in rows.lengths for start in range(0, length, GROUP)
    ]
    return shared.repeat_interleave(torch.tensor(counts, dtype=torch.int64), 0)


Part = Int4
