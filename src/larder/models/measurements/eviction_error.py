"""Eviction error of a layer: relative change of its attention output after an eviction.

Lin et al., "CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before
Generation" (2025), arXiv:2508.02401: e = |O_cut - O| / |O|, Frobenius norms of a layer's attention
output. The paper evicts with its own method and compares answers to benchmark tasks; here the
attention of the last tokens of a context selects the entries, all query heads together, and the
following tokens of the bundled text are compared. Layers do not affect each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from larder.core.errors import BadParameter
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import (
    CHUNK_TOKENS,
    TINY,
    measure_layers,
    softmax_weights,
    squared_errors,
)
from larder.models.measurements.base import Granularity, Measurement, SampleText
from larder.ops.topk import top_mask


@dataclass(frozen=True)
class EvictionErrorMeasurement(Measurement):
    """Norm of the change of a layer's output over the norm of the output, one number per layer.

    Args:
        context: tokens of the context.
        kept: tokens of it that remain, the same for all heads.
        window: last tokens of the context, whose attention selects; they remain.
        following: tokens behind the context whose outputs are compared. They see each other.
    """

    context: int = 1024
    kept: int = 128
    window: int = 8
    following: int = 256
    granularity = Granularity.LAYER

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.kept <= self.context or self.following < 1:
            raise BadParameter(
                "eviction_error needs 1 <= window <= kept <= context and following >= 1, "
                f"got {self}."
            )

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        ids = sample.ids(self.context + self.following)
        return measure_layers(decoder, ids, lambda shown: [self._error(shown)])

    def _error(self, inputs: AttentionInputs) -> float:
        device, total = inputs.queries.device, self.context + self.following
        seen = torch.ones(total, dtype=torch.bool, device=device)
        seen[: self.context] = self._remaining(inputs)
        change = whole = 0.0
        for rows in torch.arange(self.context, total, device=device).split(CHUNK_TOKENS):
            own, out = squared_errors(inputs, rows, seen.expand(len(rows), -1))
            change, whole = change + float(own.sum()), whole + float(out.sum())
        return (change / max(whole, TINY)) ** 0.5

    def _remaining(self, inputs: AttentionInputs) -> Bool[Tensor, " S"]:
        """Mask of the context tokens with most attention from the window, window included."""
        voters = torch.arange(
            self.context - self.window, self.context, device=inputs.queries.device
        )
        votes = softmax_weights(inputs, voters).sum((0, 1))
        return top_mask(votes.index_fill(0, voters, torch.inf), self.kept)


Part = EvictionErrorMeasurement
