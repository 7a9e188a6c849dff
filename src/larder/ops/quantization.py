"""Rounding numbers to codes of a few bits, asymmetric and uniform.

A group of numbers has one offset and one scale, and a number becomes the code whose value
offset + scale x code is nearest. Zirui Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit
Quantization for KV Cache" (2024), arXiv:2402.02750, section 3.1. What differs: offset and scale are
rounded to float16 first, outwards, so that they still span the group, and codes are chosen for the
rounded ones. So no number is off by more than half a step, except in groups of equal numbers: their
scale is 0, and they are off by the rounding of their offset.

Packed codes lie in planes: with n codes to a byte and B bytes, byte i holds channels i, i + B,
i + 2B, ..., the first in the lowest bits, so that unpacking reads and writes runs of memory.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float16, Shaped, UInt8
from torch import Tensor

from larder.core.errors import CacheError

FLOAT16_MAX = 65504.0  # of float16


def check_range(numbers: Float[Tensor, "*shape"]) -> None:
    """See that numbers can be rounded.

    Raises:
        CacheError: one is not finite, or beyond what an offset in float16 can be.
    """
    if bool(((numbers.abs() <= FLOAT16_MAX).logical_not()).any()):
        largest = float(numbers.abs().max())
        raise CacheError(
            f"Numbers up to {largest:g} were to be rounded, but offsets are float16 and reach "
            f"{FLOAT16_MAX:g}: keep such entries at full precision."
        )


def scales_and_offsets(
    lows: Float[Tensor, "*groups"], highs: Float[Tensor, "*groups"], bits: int
) -> tuple[Float16[Tensor, "*groups"], Float16[Tensor, "*groups"]]:
    """Offset and scale of groups whose numbers span [low, high]; the codes reach both ends."""
    same = lows == highs
    offsets = torch.where(same, lows.half(), _round_down_float16(lows))
    steps = (highs - offsets.to(highs.dtype)) / (2**bits - 1)
    return offsets, torch.where(same, torch.zeros_like(offsets), -_round_down_float16(-steps))


def quantize(
    numbers: Float[Tensor, "*shape"],
    offsets: Float16[Tensor, "*shape"],
    scales: Float16[Tensor, "*shape"],
    bits: int,
) -> UInt8[Tensor, "*shape"]:
    """The nearest code of each number; 0 where the scale is 0."""
    steps = scales.to(numbers.dtype)
    codes = (numbers - offsets.to(numbers.dtype)) / torch.where(steps == 0, 1.0, steps)
    codes = codes.round().clamp(0, 2**bits - 1).masked_fill(steps == 0, 0)
    return codes.to(torch.uint8)


def dequantize(
    codes: UInt8[Tensor, "*shape"],
    offsets: Float16[Tensor, "*shape"],
    scales: Float16[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """What codes stand for, in float32."""
    return offsets.float() + scales.float() * codes


def pack_codes(codes: UInt8[Tensor, "N W"], bits: int) -> UInt8[Tensor, "N B"]:
    """Codes of W channels in as few bytes as hold them."""
    planes = 8 // bits
    size = math.ceil(codes.shape[1] / planes)
    whole = codes.new_zeros(len(codes), planes * size)
    whole[:, : codes.shape[1]] = codes
    bytes_, *others = whole.split(size, dim=1)
    bytes_ = bytes_.clone()
    for plane, part in enumerate(others, 1):
        bytes_ |= part << (bits * plane)
    return bytes_


def unpack_codes(stored: UInt8[Tensor, "N B"], bits: int, width: int) -> UInt8[Tensor, "N W"]:
    """The codes of `width` channels out of their bytes."""
    planes = [stored >> (bits * plane) & (2**bits - 1) for plane in range(8 // bits)]
    return torch.cat(planes, dim=1)[:, :width]


def _round_down_float16(numbers: Float[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """The largest float16 that is not above each number."""
    near = numbers.half()
    above = near.to(numbers.dtype) > numbers
    return torch.where(above, _next_below(near), near)


def _next_below(numbers: Shaped[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """By their bits: one less moves a positive float16 towards 0, a negative one away from it."""
    bits = numbers.view(torch.int16)
    below = torch.where(numbers > 0, bits - 1, bits + 1)
    tiniest_negative = torch.full_like(bits, -(2**15) + 1)
    return torch.where(numbers == 0, tiniest_negative, below).view(torch.float16)
