"""Means of the coded components of each head of a text, which its symbols are centered on.

Keys and values of one text lie around another mean than those of the calibration text, by up to
several steps in many components: coded once per head, the difference costs a byte per component.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int8, Int64
from torch import Tensor

LARGEST = 127  # code
CODES_KEY, SCALES_KEY = "transform.means", "transform.mean_scales"


@dataclass(frozen=True, eq=False)
class ComponentMeans:
    """Mean of each component of each kv head; without rows all of them are 0.

    Args:
        codes: of the components of keys, then of values.
        scales: of the codes of keys, and of values.
    """

    codes: Int8[Tensor, "K D2"]
    scales: Float[Tensor, "K 2"]

    @staticmethod
    def zeros() -> ComponentMeans:
        """Means of 0, which take no bytes."""
        return ComponentMeans(torch.zeros(0, 0, dtype=torch.int8), torch.zeros(0, 2))

    @staticmethod
    def of(
        heads: Int64[Tensor, " N"], components: Float[Tensor, "N D2"], num_heads: int
    ) -> ComponentMeans:
        """Means of some entries, rounded to codes.

        Args:
            heads: kv head of each entry.
        """
        sums = components.new_zeros(num_heads, components.shape[1]).index_add_(0, heads, components)
        counts = torch.bincount(heads, minlength=num_heads).clamp(min=1)
        sides = (sums / counts[:, None]).unflatten(1, (2, -1))
        scales = (sides.abs().amax(2) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (sides / scales[..., None]).round().flatten(1)
        return ComponentMeans(codes.to(torch.int8), scales)

    def with_heads(self, other: ComponentMeans, heads: Int64[Tensor, " N"]) -> ComponentMeans:
        """Means with those of some heads in place of these."""
        codes, scales = other.codes.clone(), other.scales.clone()
        if len(self.codes):
            stays = torch.ones(len(codes), dtype=torch.bool).index_fill(0, heads, False)
            codes[stays], scales[stays] = self.codes[stays], self.scales[stays]
        return ComponentMeans(codes, scales)

    def of_head(self, head: int) -> Float[Tensor, " D2"] | float:
        """Mean of each component of a head."""
        return self.numbers[head] if len(self.codes) else 0.0

    @property
    def numbers(self) -> Float[Tensor, "K D2"]:
        """All means."""
        return (self.codes.float().unflatten(1, (2, -1)) * self.scales[..., None]).flatten(1)

    def state(self) -> dict[str, Tensor]:
        """Copies of the tensors by name."""
        return {CODES_KEY: self.codes.clone(), SCALES_KEY: self.scales.clone()}

    @staticmethod
    def adopt(state: Mapping[str, Tensor]) -> ComponentMeans:
        """Means restored from `state`; caches that were saved before there were any have zeros."""
        if CODES_KEY not in state:
            return ComponentMeans.zeros()
        return ComponentMeans(state[CODES_KEY].cpu(), state[SCALES_KEY].cpu())


@dataclass(frozen=True, eq=False)
class CenteredBlock:
    """Components of a block of a head, without their means, and tiers."""

    head: int
    numbers: np.ndarray
    tiers: np.ndarray


@dataclass(frozen=True, eq=False)
class CenteredBlocks:
    """Entries to code, in blocks.

    Args:
        nbytes_beside: of means, index and positions, which no step changes.
    """

    blocks: tuple[CenteredBlock, ...]
    nbytes_beside: int

    @property
    def held_bytes(self) -> int:
        """Bytes of the components while they are held."""
        return sum(block.numbers.nbytes for block in self.blocks)
