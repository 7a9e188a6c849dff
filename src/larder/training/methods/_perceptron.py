"""Fit of a perceptron over hidden states, on inputs and targets of mean 0 and variance 1.

Both scalings are then taken into the weights, so that a gate reads hidden states as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.policy.providers._layer_gates import FIRST, LAST

SMALLEST = 1e-6  # a spread below this counts as none


@dataclass(frozen=True)
class Standardization:
    """Mean and spread of each column."""

    mean: Float[Tensor, " N"]
    spread: Float[Tensor, " N"]

    @staticmethod
    def of(rows: Float[Tensor, "M N"]) -> Standardization:
        return Standardization(rows.mean(0), rows.std(0).clamp(min=SMALLEST))

    def apply(self, rows: Float[Tensor, "M N"]) -> Float[Tensor, "M N"]:
        return (rows - self.mean) / self.spread


def first_tensors(width: int, inner: int, heads: int, seed: int) -> dict[str, Tensor]:
    """Tensors before training, as `torch.nn.Linear` draws them."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int, fan: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=source) - 1) / math.sqrt(fan)

    return {
        f"{FIRST}.weight": draw(inner, width, fan=width),
        f"{FIRST}.bias": draw(inner, fan=width),
        f"{LAST}.weight": draw(heads, inner, fan=inner),
        f"{LAST}.bias": draw(heads, fan=inner),
    }


def unscaled(
    tensors: dict[str, Tensor], inputs: Standardization, outputs: Standardization
) -> dict[str, Tensor]:
    """Tensors that read and predict without the scalings."""
    first, last = tensors[f"{FIRST}.weight"] / inputs.spread, tensors[f"{LAST}.weight"]
    return {
        f"{FIRST}.weight": first,
        f"{FIRST}.bias": tensors[f"{FIRST}.bias"] - first @ inputs.mean,
        f"{LAST}.weight": last * outputs.spread[:, None],
        f"{LAST}.bias": tensors[f"{LAST}.bias"] * outputs.spread + outputs.mean,
    }


def shuffled_batches(rows: int, size: int, source: torch.Generator) -> tuple[Tensor, ...]:
    """Row indices of an epoch in random order."""
    return torch.randperm(rows, generator=source).split(size)
