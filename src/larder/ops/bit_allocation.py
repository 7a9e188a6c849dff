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
from jaxtyping import Float, Int16
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


@dataclass(frozen=True, eq=False)
class AllocationTable:
    """Best groups for every budget up to one, by dynamic programming.

    Args:
        options: groups that may be chosen.
        choice: index of the last group among the options, by components and by units of bits spent.
    """

    options: tuple[ComponentGroup, ...]
    choice: Int16[ndarray, "W1 U1"]

    @staticmethod
    def of(errors: Errors, width: int, budget: int) -> AllocationTable:
        """Table of groups with the least sum of errors.

        Args:
            errors: of each group, by size and bits; those of one component are among them.
            width: number of components.
            budget: most bits of a token.
        """
        units = budget // UNIT
        options = tuple(ComponentGroup(size, bits) for size, bits in errors)
        best = np.full((width + 1, units + 1), np.inf)
        best[0] = 0
        choice = np.zeros((width + 1, units + 1), np.int16)
        for stop in range(1, width + 1):
            for index, option in enumerate(options):
                cost, start = option.cost // UNIT, stop - option.size
                if start < 0 or start % option.size or cost > units:
                    continue
                found = (
                    best[start, : units + 1 - cost]
                    + errors[option.size, option.bits][start // option.size]
                )
                is_less = found < best[stop, cost:]
                np.copyto(best[stop, cost:], found, where=is_less)
                np.copyto(choice[stop, cost:], index, where=is_less)
        return AllocationTable(options, choice)

    @property
    def budget(self) -> int:
        """Most bits of a token that groups are known for."""
        return UNIT * (self.choice.shape[1] - 1)

    def groups(self, budget: int) -> list[ComponentGroup]:
        """Groups in order with the least sum of errors whose bits fit the budget of a token."""
        found = list[ComponentGroup]()
        stop, left = self.choice.shape[0] - 1, min(budget, self.budget) // UNIT
        while stop:
            found.append(self.options[self.choice[stop, left]])
            stop, left = stop - found[-1].size, left - found[-1].cost // UNIT
        return found[::-1]


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
