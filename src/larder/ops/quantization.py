"""Asymmetric uniform quantization of rows to codes of a few bits.

A group of numbers has one offset (zero point) and one scale, and a number becomes the code whose
value offset + scale x code is nearest. Zirui Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit
Quantization for KV Cache" (2024), arXiv:2402.02750, section 3.1. What differs: offset and scale are
rounded to float16 first, outwards, so that they still span the group, and codes are computed with
the rounded values. So the error is at most half a step, except in groups of equal numbers: their
scale is 0, and the error is the rounding of their offset.

Codes are packed in planes: with n codes to a byte and B bytes, byte i holds channels i, i + B,
i + 2B, ..., the first in the lowest bits, so that unpacking reads and writes runs of memory. Codes
whose bits do not divide 8 are packed as fields that do, the highest bits first: of 7 bits 4, then
2, then 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Float16, Int16, Int32, Int64, Shaped, UInt8
from torch import Tensor

from larder.core.codec import Grid, QuantizationScheme, ScaleGranularity, bit_fields
from larder.core.errors import CacheError
from larder.ops.packing import starts_of

FLOAT16_MAX = 65504.0
SAVED_NAMES = {"outlier_indices": "spots", "outliers": "strays"}  # in saved states
MIN_FACTOR = 2.0**-8  # of the largest; divided by less, ordinary keys would leave float16


def check_range(numbers: Float[Tensor, "*shape"]) -> None:
    """Check that numbers can be quantized.

    Raises:
        CacheError: one is not finite, or beyond the range of float16.
    """
    if bool(((numbers.abs() <= FLOAT16_MAX).logical_not()).any()):
        largest = float(numbers.abs().max())
        raise CacheError(
            f"Numbers up to {largest:g} cannot be quantized, because offsets are float16 and "
            f"reach {FLOAT16_MAX:g}: keep such entries at full precision."
        )


def scales_and_offsets(
    lows: Float[Tensor, "*groups"], highs: Float[Tensor, "*groups"], bits: int
) -> tuple[Float16[Tensor, "*groups"], Float16[Tensor, "*groups"]]:
    """Offset and scale of groups whose numbers span [low, high]; the codes cover both ends.

    Raises:
        CacheError: a group spans more than the range of float16, and codes have one bit.
    """
    same = lows == highs
    offsets = torch.where(same, lows.half(), _round_down_float16(lows))
    steps = (highs - offsets.to(highs.dtype)) / (2**bits - 1)
    if bits == 1 and bool((steps > FLOAT16_MAX).any()):
        raise CacheError(
            f"Numbers that span {float(steps.max()):g} cannot be quantized to one bit, because "
            f"scales are float16 and reach {FLOAT16_MAX:g}: take two bits, or keep such entries "
            "at full precision."
        )
    return offsets, torch.where(same, torch.zeros_like(offsets), -_round_down_float16(-steps))


def quantize(
    numbers: Float[Tensor, "*shape"],
    offsets: Float16[Tensor, "*#shape"],
    scales: Float16[Tensor, "*#shape"],
    bits: int,
) -> UInt8[Tensor, "*shape"]:
    """Nearest code of each number; 0 where the scale is 0."""
    steps = scales.to(numbers.dtype)
    codes = (numbers - offsets.to(numbers.dtype)) / torch.where(steps == 0, 1.0, steps)
    codes = codes.round().clamp(0, 2**bits - 1).masked_fill(steps == 0, 0)
    return codes.to(torch.uint8)


def dequantize(
    codes: UInt8[Tensor, "*shape"],
    offsets: Float16[Tensor, "*#shape"],
    scales: Float16[Tensor, "*#shape"],
) -> Float[Tensor, "*shape"]:
    """Numbers of codes, in float32."""
    return offsets.float() + scales.float() * codes


def pack_codes(codes: UInt8[Tensor, "N W"], bits: int) -> UInt8[Tensor, "N B"]:
    """Codes of W channels packed into bytes."""
    parts = [
        _pack_field(codes >> shift & (2**width - 1), width) for width, shift in bit_fields(bits)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def unpack_codes(stored: UInt8[Tensor, "N B"], bits: int, width: int) -> UInt8[Tensor, "N W"]:
    """Codes of `width` channels from packed bytes."""
    codes, start = stored.new_zeros(len(stored), width), 0
    for index, shift in bit_fields(bits):
        stop = start + math.ceil(width / (8 // index))
        field = stored[:, start:stop]
        planes = [field >> (index * plane) & (2**index - 1) for plane in range(8 // index)]
        codes |= torch.cat(planes, dim=1)[:, :width] << shift
        start = stop
    return codes


def _pack_field(codes: UInt8[Tensor, "N W"], bits: int) -> UInt8[Tensor, "N B"]:
    """Codes of 1, 2, 4 or 8 bits packed into bytes."""
    planes = 8 // bits
    size = math.ceil(codes.shape[1] / planes)
    whole = codes.new_zeros(len(codes), planes * size)
    whole[:, : codes.shape[1]] = codes
    bytes_, *others = whole.split(size, dim=1)
    bytes_ = bytes_.clone()
    for plane, part in enumerate(others, 1):
        bytes_ |= part << (bits * plane)
    return bytes_


def _round_down_float16(numbers: Float[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """Largest float16 not above each number."""
    near = numbers.half()
    above = near.to(numbers.dtype) > numbers
    return torch.where(above, _next_below(near), near)


def _next_below(numbers: Shaped[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """Next smaller float16: bits minus one for positive numbers, plus one for negative ones."""
    bits = numbers.view(torch.int16)
    below = torch.where(numbers > 0, bits - 1, bits + 1)
    tiniest_negative = torch.full_like(bits, -(2**15) + 1)
    return torch.where(numbers == 0, tiniest_negative, below).view(torch.float16)


@dataclass(frozen=True)
class QuantizedRows:
    """Quantized rows, group by group; W of D channels are stored.

    Args:
        scheme: the quantization scheme.
        stored: packed codes [T, B], or the numbers [T, W] if the scheme has no bits.
        offsets, scales: per group and channel [G, W], or per entry and channel group
            [T, W / group]; of codes without even levels the norm of an entry is its scale, and
            that of a sketched remainder its offset.
        channels: indices of the stored channels, ascending [G, W]; empty if all are stored.
        factors: divisors applied before quantization [G, W]; empty if there are none.
        outlier_indices: row x W + channel of each outlier, ascending.
        outliers: numbers stored at half precision instead of codes.
    """

    scheme: QuantizationScheme
    stored: Shaped[Tensor, "T B"]
    offsets: Float16[Tensor, "P V"]
    scales: Float16[Tensor, "P W"]
    channels: Int16[Tensor, "G1 W1"]
    factors: Float16[Tensor, "G2 W2"]
    outlier_indices: Int32[Tensor, " S"]
    outliers: Float16[Tensor, " S"]

    @staticmethod
    def nothing(scheme: QuantizationScheme, like: Tensor) -> QuantizedRows:
        """Empty rows; numbers without quantization get the dtype of `like`."""
        none = like.new_zeros(0, scheme.head_dim, dtype=torch.promote_types(like.dtype, torch.half))
        counts = torch.zeros(0, dtype=torch.int64)
        return quantize_rows(none, counts, scheme, none.new_empty(0, 0), like.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by saved name."""
        names = (f.name for f in fields(self) if f.name != "scheme")
        return {SAVED_NAMES.get(name, name): getattr(self, name) for name in names}

    @staticmethod
    def adopt(scheme: QuantizationScheme, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        """Rows that take ownership of the tensors, given by saved name."""
        names = [f.name for f in fields(QuantizedRows) if f.name != "scheme"]
        own = {name: tensors[SAVED_NAMES.get(name, name)] for name in names}
        return QuantizedRows(scheme, **own)

    def decoded(
        self, rows: Int64[Tensor, " N"], groups: Int64[Tensor, " N"]
    ) -> Float[Tensor, "N D"]:
        """Numbers of some distinct rows of the given groups; float32 if they were quantized."""
        scheme, rows = self.scheme, rows.to(self.stored.device)
        groups = groups.to(rows.device)
        if scheme.bits and scheme.grid is not Grid.EVEN:
            return self._turned_back(rows)
        if scheme.bits:
            offsets = self._expanded(self.offsets, rows, groups)
            scales = self._expanded(self.scales, rows, groups)
            codes = unpack_codes(self.stored[rows], scheme.bits, scheme.channels)
            numbers = dequantize(codes, offsets, scales)
            at, channels, outliers = self._outliers_of(rows)
            numbers[at, channels] = outliers.float()
        else:
            numbers = self.stored[rows]
        if len(self.factors):
            numbers = numbers * self.factors[groups].float()
        if numbers.shape[1] == scheme.head_dim:
            return numbers
        whole = numbers.new_zeros(len(numbers), scheme.head_dim)
        return whole.scatter_(1, self.channels[groups].long(), numbers)

    def select(self, rows: Int64[Tensor, " N"], groups: Int64[Tensor, " M"]) -> QuantizedRows:
        """Some rows of some groups, both ascending, without requantization."""
        rows, groups = rows.to(self.stored.device), groups.to(self.stored.device)
        shared = groups if self.scheme.sharing is ScaleGranularity.CHANNEL else rows
        at, channels, outliers = self._outliers_of(rows)
        return QuantizedRows(
            self.scheme,
            self.stored[rows],
            self.offsets[shared] if self.scheme.bits else self.offsets.clone(),
            self.scales[shared] if self.scheme.bits else self.scales.clone(),
            self.channels[groups] if len(self.channels) else self.channels.clone(),
            self.factors[groups] if len(self.factors) else self.factors.clone(),
            (at * self.scheme.channels + channels).int(),
            outliers,
        )

    def _turned_back(self, rows: Int64[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """Numbers of some rows whose codes have no even levels."""
        from larder.ops import rotated_quantization as rotated  # few codecs rotate

        bits, norms = self.scheme.bits, self.scales[rows]
        codes = unpack_codes(self.stored[rows], bits, self.scheme.channels)
        if self.scheme.grid is Grid.SKETCHED:
            return rotated.decode_sketched(codes, norms, self.offsets[rows], bits)
        return rotated.decode(codes, norms, bits)

    def _expanded(
        self, shared: Float16[Tensor, "P V"], rows: Tensor, groups: Tensor
    ) -> Float16[Tensor, "N _"]:
        if self.scheme.sharing is ScaleGranularity.CHANNEL:
            return shared[groups]
        return _expand_groups(shared[rows], self.scheme)

    def _outliers_of(self, rows: Int64[Tensor, " N"]) -> tuple[Tensor, Tensor, Tensor]:
        """Outliers of some rows: index in `rows`, channel, and number of each."""
        if not len(self.outlier_indices) or not len(rows):
            none = rows.new_empty(0)
            return none, none, self.outliers[:0].clone()
        ordered, order = rows.sort()
        width = self.scheme.channels
        edges = torch.stack([ordered[0] * width, (ordered[-1] + 1) * width])
        first, stop = torch.searchsorted(self.outlier_indices, edges).tolist()
        indices, outliers = self.outlier_indices[first:stop].long(), self.outliers[first:stop]
        own = indices.div(width, rounding_mode="floor")
        found = torch.searchsorted(ordered, own).clamp(max=len(rows) - 1)
        among = ordered[found] == own
        return order[found[among]], indices[among] % width, outliers[among]


def concat_rows(parts: Sequence[QuantizedRows]) -> QuantizedRows:
    """Concatenated rows and groups."""
    shifts = [sum(len(part.stored) for part in parts[:i]) for i in range(len(parts))]
    moved = [
        replace(part, outlier_indices=part.outlier_indices + shift * part.scheme.channels)
        for part, shift in zip(parts, shifts, strict=True)
    ]
    named = [part.tensors() for part in moved]
    joined = {name: torch.cat([part[name] for part in named]) for name in named[0]}
    return QuantizedRows.adopt(parts[0].scheme, joined)


def quantize_rows(
    numbers: Float[Tensor, "N D"],
    counts: Int64[Tensor, " G"],
    scheme: QuantizationScheme,
    weights: Float[Tensor, "K D1"],
    dtype: torch.dtype,
) -> QuantizedRows:
    """Quantized rows, given group by group.

    Args:
        numbers: in float32 or higher precision if the scheme has bits.
        counts: rows of each group, at least 1; in host memory.
        weights: of the channels in each group [G, D]; empty to use the group's own numbers.
        dtype: of numbers without quantization.

    Raises:
        CacheError: a number to quantize is beyond the range of float16.
    """
    groups = _Groups.of(counts, numbers.device)
    none = numbers.new_empty(0, scheme.channels)
    channels, factors = none.short(), none.half()
    if scheme.channels < scheme.head_dim:
        weighed = weights if len(weights) else _energy(numbers, groups)
        channels = _top_channels(weighed, scheme)
        numbers = numbers.gather(1, channels[groups.own])
    if not scheme.bits:
        stored, outlier_indices = numbers.to(dtype).clone(), numbers.new_empty(0, dtype=torch.int32)
        return QuantizedRows(
            scheme=scheme,
            stored=stored,
            offsets=none.half(),
            scales=none.half(),
            channels=channels.short(),
            factors=factors,
            outlier_indices=outlier_indices,
            outliers=outlier_indices.half(),
        )
    if scheme.balance:
        weighed = weights if len(weights) else numbers[groups.rows].abs().amax(1)
        factors = _balance_factors(weighed, scheme)
        numbers = numbers / factors[groups.own].to(numbers.dtype)
    check_range(numbers)
    if scheme.grid is not Grid.EVEN:
        return _quantize_rotated(numbers, scheme)
    return _quantize_groups(numbers, groups, scheme, channels.short(), factors)


def _quantize_rotated(numbers: Float[Tensor, "N W"], scheme: QuantizationScheme) -> QuantizedRows:
    """Rows quantized after a random rotation.

    Raises:
        CacheError: the norm of a row is beyond the range of float16.
    """
    from larder.ops import rotated_quantization as rotated  # few codecs rotate

    none = numbers.new_empty(0, scheme.channels)
    if scheme.grid is Grid.SKETCHED:
        codes, norms, rest_norms = rotated.encode_sketched(numbers, scheme.bits)
    else:
        codes, norms = rotated.encode(numbers, scheme.bits)
        rest_norms = norms[:, :0]
    check_range(norms)
    return QuantizedRows(
        scheme=scheme,
        stored=pack_codes(codes, scheme.bits),
        offsets=rest_norms,
        scales=norms,
        channels=none.short(),
        factors=none.half(),
        outlier_indices=numbers.new_empty(0, dtype=torch.int32),
        outliers=numbers.new_empty(0).half(),
    )


@dataclass(frozen=True)
class _Groups:
    """Index of rows that are stored group by group.

    Args:
        counts: rows of each group, in host memory.
        rows: row indices of every group; smaller groups repeat their last, which changes no range.
        own: group of each row.
    """

    counts: Int64[Tensor, " G"]
    rows: Int64[Tensor, "G n"]
    own: Int64[Tensor, " N"]

    @staticmethod
    def of(counts: Int64[Tensor, " G"], device: torch.device) -> _Groups:
        longest = int(counts.max()) if len(counts) else 1
        steps = torch.arange(longest).minimum((counts - 1)[:, None])
        rows = starts_of(counts)[:, None] + steps
        own = torch.repeat_interleave(torch.arange(len(counts)), counts)
        return _Groups(counts, rows.to(device), own.to(device))


def _quantize_groups(
    numbers: Float[Tensor, "N W"],
    groups: _Groups,
    scheme: QuantizationScheme,
    channels: Int16[Tensor, "G1 W1"],
    factors: Float16[Tensor, "G2 W2"],
) -> QuantizedRows:
    """Quantized rows of selected channels that were divided by their factors."""
    is_outlier, inliers = _find_outliers(numbers, groups, scheme)
    lows, highs = _group_ranges(inliers, groups.rows, scheme)
    offsets, scales = scales_and_offsets(lows, highs, scheme.bits)
    if scheme.sharing is ScaleGranularity.CHANNEL:
        codes = quantize(inliers, offsets[groups.own], scales[groups.own], scheme.bits)
    else:
        expanded_offsets, expanded_scales = (
            _expand_groups(offsets, scheme),
            _expand_groups(scales, scheme),
        )
        codes = quantize(inliers, expanded_offsets, expanded_scales, scheme.bits)
    outlier_indices = is_outlier.flatten().nonzero().flatten()
    return QuantizedRows(
        scheme=scheme,
        stored=pack_codes(codes.masked_fill(is_outlier, 0), scheme.bits),
        offsets=offsets,
        scales=scales,
        channels=channels,
        factors=factors,
        outlier_indices=outlier_indices.int(),
        outliers=numbers.flatten()[outlier_indices].half(),
    )


def _energy(numbers: Float[Tensor, "N D"], groups: _Groups) -> Float[Tensor, "G D"]:
    """Sum of squares of each channel in each group."""
    sums = numbers.new_zeros(len(groups.counts), numbers.shape[1])
    return sums.index_add_(0, groups.own, numbers.square())


def _top_channels(
    weights: Float[Tensor, "G D"], scheme: QuantizationScheme
) -> Int64[Tensor, "G W"]:
    """Channels with the highest weights, ascending; ties go to the first."""
    order = weights.sort(dim=1, descending=True, stable=True).indices
    return order[:, : scheme.channels].sort(dim=1).values


def _balance_factors(
    weights: Float[Tensor, "G D"], scheme: QuantizationScheme
) -> Float16[Tensor, "G D"]:
    """Powers of the weights, the largest of a group 1: a common factor would only move scales."""
    largest = weights.amax(1, keepdim=True)
    relative = torch.where(largest > 0, weights / largest, torch.ones_like(weights)).clamp(min=0)
    return relative.pow(scheme.balance).clamp(min=MIN_FACTOR).half()


def _find_outliers(
    numbers: Float[Tensor, "N W"], groups: _Groups, scheme: QuantizationScheme
) -> tuple[Tensor, Float[Tensor, "N W"]]:
    """Mask of the outliers, and the numbers with outliers replaced by medians."""
    rows, counts = groups.rows, groups.counts
    far = torch.zeros_like(numbers, dtype=torch.bool)
    limits = torch.tensor([scheme.outlier_count(count) for count in counts.tolist()])
    if not len(counts) or not int(limits.max()):
        return far, numbers
    true = (torch.arange(rows.shape[1]) < counts[:, None]).to(rows.device)[:, :, None]
    if scheme.sharing is ScaleGranularity.CHANNEL:
        ordered = numbers[rows].masked_fill(~true, torch.inf).sort(dim=1).values  # [G, n, W]
        middle = ((counts - 1) // 2).to(rows.device)
        middles = ordered[torch.arange(len(rows), device=rows.device), middle][groups.own]
    else:
        middles = _expand_groups(_channel_groups(numbers, scheme).median(2).values, scheme)
    distances = (numbers - middles).abs()
    spread = distances[rows].masked_fill(~true, -1.0)
    order = spread.flatten(1).sort(dim=1, descending=True, stable=True).indices
    order = order[:, : int(limits.max())]
    within = torch.arange(order.shape[1]) < limits[:, None]
    group, index = within.to(order.device).nonzero().T
    chosen = order[group, index]
    width = numbers.shape[1]
    far[rows[group, chosen.div(width, rounding_mode="floor")], chosen % width] = True
    return far, torch.where(far, middles, numbers)


def _group_ranges(
    numbers: Float[Tensor, "N W"], rows: Int64[Tensor, "G n"], scheme: QuantizationScheme
) -> tuple[Float[Tensor, "P V"], Float[Tensor, "P V"]]:
    """Minimum and maximum of the numbers that share an offset."""
    if scheme.sharing is ScaleGranularity.ENTRY:
        groups = _channel_groups(numbers, scheme)
        return groups.amin(2), groups.amax(2)
    return numbers[rows].amin(1), numbers[rows].amax(1)


def _channel_groups(
    numbers: Float[Tensor, "N W"], scheme: QuantizationScheme
) -> Float[Tensor, "N P group"]:
    """Channels in groups; the last group repeats its last channel."""
    whole = scheme.scales_per_entry * scheme.group
    last = torch.arange(whole, device=numbers.device).clamp(max=scheme.channels - 1)
    return numbers[:, last].unflatten(1, (scheme.scales_per_entry, scheme.group))


def _expand_groups(
    groups: Shaped[Tensor, "N P"], scheme: QuantizationScheme
) -> Shaped[Tensor, "N W"]:
    return groups.repeat_interleave(scheme.group, dim=1)[:, : scheme.channels]
