"""Groups of components and their bits with the least squared error for a budget (KVTC).

Staniszewski and Lancucki, "KV Cache Transform Coding for Compact Storage in LLM Inference" (KVTC,
2025), arXiv:2511.01815: components, largest deviation first, are divided in groups of a few sizes;
in each token, a group of some bits has a shift and a scale of 16 bits each, and a group of no bits
takes nothing. Dynamic programming over the number of components and the bits spent finds the
division and the bits. What is inferred: a group begins at a multiple of its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from larder.ops.quantization import dequantize, quantize, scales_and_offsets

SIZES = (1, 16, 64, 256, 1024)
WIDTHS = (0, 2, 4, 8)  # bits of a component
GROUP_BITS = 32  # shift and scale of a group in a token
UNIT = 2  # bits; every cost is a multiple

Errors = Mapping[tuple[int, int], Float[ndarray, " _"]]


@dataclass(frozen=True)
class ComponentGroup:
    """Neighboring components with the same bits.

    Args:
        size: number of components.
        bits: of each; 0 for none.
    """

    size: int
    bits: int

    @property
    def cost(self) -> int:
        """Bits of a token."""
        return self.size * self.bits + GROUP_BITS if self.bits else 0


def group_errors(components: Float[Tensor, "N W"], sizes: Sequence[int] = SIZES) -> Errors:
    """Squared errors of every group that may be chosen, by size and bits, over some tokens."""
    found: dict[tuple[int, int], Float[ndarray, " _"]] = {}
    width = components.shape[1]
    for size in sizes:
        if size > width:
            continue
        groups = components[:, : width // size * size].unflatten(1, (-1, size))
        for bits in WIDTHS:
            left = groups - _rounded(groups, bits) if bits else groups
            found[size, bits] = left.double().square().sum((0, 2)).numpy()
    return found


def allocate(errors: Errors, width: int, budget: int) -> list[ComponentGroup]:
    """Groups in order with the least sum of errors whose bits fit the budget of a token.

    Args:
        errors: of each group, by size and bits; those of one component are among them.
        width: number of components.
    """
    units = budget // UNIT
    best = np.zeros((width + 1, units + 1))
    choice = np.zeros((width + 1, units + 1), np.int16)
    options = [ComponentGroup(size, bits) for size, bits in errors]
    for stop in range(1, width + 1):
        best[stop] = np.inf
        for number, option in enumerate(options):
            cost, start = option.cost // UNIT, stop - option.size
            if start < 0 or start % option.size or cost > units:
                continue
            own = errors[option.size, option.bits][start // option.size]
            found = best[start, : units + 1 - cost] + own
            is_less = found < best[stop, cost:]
            best[stop, cost:][is_less] = found[is_less]
            choice[stop, cost:][is_less] = number
    groups, stop, left = list[ComponentGroup](), width, units
    while stop:
        groups.append(options[choice[stop, left]])
        stop, left = stop - groups[-1].size, left - groups[-1].cost // UNIT
    return groups[::-1]


def quantized_group(
    numbers: Float[Tensor, "*N S"], bits: int
) -> tuple[Tensor, Float[Tensor, "*N 1"], Float[Tensor, "*N 1"]]:
    """Codes, shifts and scales of the components of a group in each token."""
    lows, highs = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
    shifts, scales = scales_and_offsets(lows, highs, bits)
    return quantize(numbers, shifts, scales, bits), shifts, scales


def _rounded(groups: Float[Tensor, "N G S"], bits: int) -> Float[Tensor, "N G S"]:
    codes, shifts, scales = quantized_group(groups, bits)
    return dequantize(codes, shifts, scales)
