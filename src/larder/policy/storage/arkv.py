"""Storage with a share of exact entries per layer, the others quantized (ARKV).

Lei and Ilager, "ARKV: Adaptive and Resource-Efficient KV Cache Management under Limited Memory
Budget for Long-Context Inference in LLMs" (2026), arXiv:2603.08727. A layer's preference is
H^(1/tau1) * V^(1/tau2) * U^(1/tau3): entropy, variance and kurtosis of the weights that the last
queries give each entry, summed over entries and heads. Divided by the highest preference of all
layers it is the share of a layer's entries that stay exact, the best ones; the others are rounded,
and what the budget does not keep is gone. Formulas as in the released code, its least variance of
1e-8 under the kurtosis included. The paper's score of entries is `mean_variance`, its budget
uniform. Differences: int8 or less where that code takes 8-bit floats, in groups; shares are taken
again at every decision, where that code takes them once, after the prompt.

The bytes that it saves are not spent on more entries: this holds less than the budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.codec import Codec
from larder.core.observation import Observation, StorageStatistics
from larder.core.spec import LayerSpec
from larder.core.types import WeightChunk
from larder.ops.column_statistics import CHUNK
from larder.policy.attention_reduction import check_taus, gather_last_queries, sum_statistics
from larder.policy.storage._mixed_precision import MixedPrecisionStorage, PrecisionTier
from larder.policy.storage.quantized import check_codec

LEAST_VARIANCE = 1e-8  # of a weight over the queries, under the kurtosis


@dataclass(frozen=True)
class ARKV(MixedPrecisionStorage):
    """Share of exact entries of each layer, from the shape of its attention.

    Args:
        bits: of a rounded number, from 1 to 8.
        group: entries rounded together, and channels of a value that share a scale.
        tau1: tempers the entropy; higher is more even.
        tau2: tempers the variance; higher is more even.
        tau3: tempers the kurtosis; higher is more even.
        window: last queries that are observed, at most 64 tokens.
    """

    bits: int = 8
    group: int = 32
    tau1: float = 1.0
    tau2: float = 1.0
    tau3: float = 1.0
    window: int = 32
    compares_layers = True

    def __post_init__(self) -> None:
        check_codec("arkv", self.bits, self.group)
        check_taus("arkv", self.tau1, self.tau2, self.tau3)
        require(2 <= self.window <= CHUNK, "arkv.window", f"2 to {CHUNK} tokens", self.window)

    def tiers(self) -> tuple[PrecisionTier, ...]:
        return (PrecisionTier(Codec(self.bits, self.bits, self.group), 0.0),)

    def entries(self, tokens: int, layers: Sequence[LayerSpec], itemsize: int) -> int:
        self.check(layers, itemsize)
        return tokens

    def full_precision_entries(self, quota: int, layer: LayerSpec, itemsize: int) -> int:
        return quota

    def capacities(self, quota: int, head_dim: int, itemsize: int, share: float = 1.0) -> list[int]:
        return [int(share * quota)]

    def inspect(self, observation: Observation) -> StorageStatistics:
        """Logarithm of the layer's preference."""
        sums = sum_statistics(gather_last_queries(_WeightMoments(), observation, self.window), 3)
        factors = zip(sums, (self.tau1, self.tau2, self.tau3), strict=True)
        tiny = torch.finfo(torch.float64).tiny
        return StorageStatistics(numbers=(sum(math.log(max(f, tiny)) / tau for f, tau in factors),))

    def compare(self, inspected: Sequence[StorageStatistics]) -> list[float]:
        highest = max((each.numbers[0] for each in inspected), default=0.0)
        return [math.exp(each.numbers[0] - highest) for each in inspected]


class _WeightMoments:
    """Entropy, variance and kurtosis of the weights that an entry gets, from one chunk of them."""

    def start(self, like: Float[Tensor, "R S"]) -> tuple[Tensor, ...]:
        return (like.new_zeros(3, *like.shape),)

    def fold(self, state: tuple[Tensor, ...], weights: WeightChunk, first: int, total: int) -> None:
        apart = weights - weights.mean(1, keepdim=True)
        second = apart.square().mean(1)
        state[0][0] = -torch.xlogy(weights, weights).sum(1)
        state[0][1] = apart.square().sum(1) / max(weights.shape[1] - 1, 1)
        state[0][2] = apart.pow(4).mean(1) / second.clamp(min=LEAST_VARIANCE).square()

    def finish(self, state: tuple[Tensor, ...], total: int) -> Float[Tensor, "N S"]:
        return state[0].flatten(0, 1)


Part = ARKV
