"""How far each layer's attention is off when most of the context has been evicted from it.

Lin et al., "CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before
Generation" (2025), arXiv:2508.02401: e = |O_cut - O| / |O|, Frobenius norms of a layer's attention
output. There the cache is cut as the method itself cuts it, for answers to tasks of a benchmark;
here by what the last tokens of a context look at, all query heads together, and for the tokens of
the bundled text that follow. No layer is disturbed by what was cut in another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from larder.core.errors import BadParameter
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import (
    CHUNK_TOKENS,
    TINY,
    AttentionInputs,
    capture_attention,
    flatten_layers,
)
from larder.models.measurements.base import Granularity, Measurement, SampleText
from larder.ops.topk import top_mask


@dataclass(frozen=True)
class EvictionErrorMeasurement(Measurement):
    """The change of a layer's output by its size, one number per layer.

    Args:
        context: tokens that are evicted from.
        kept: how many of them stay, the same for all heads.
        window: the last of them, which choose, and stay.
        following: tokens behind them whose attention is compared. They see each other.
    """

    context: int = 1024
    kept: int = 128
    window: int = 8
    following: int = 256
    granularity = Granularity.LAYER

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.kept <= self.context or self.following < 1:
            raise BadParameter(
                f"It needs 1 <= window <= kept <= context and following >= 1, got {self}."
            )

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        numbers: dict[int, list[float]] = {}

        def show(layer: int, shown: AttentionInputs) -> None:
            numbers[layer] = [self._error(shown)]

        capture_attention(decoder, sample.ids(self.context + self.following), show)
        return flatten_layers(decoder, numbers)

    def _error(self, shown: AttentionInputs) -> float:
        device, total = shown.queries.device, self.context + self.following
        seen = torch.ones(total, dtype=torch.bool, device=device)
        seen[: self.context] = self._stays(shown)
        change = whole = 0.0
        for rows in torch.arange(self.context, total, device=device).split(CHUNK_TOKENS):
            own, out = shown.squares(rows, seen.expand(len(rows), -1))
            change, whole = change + float(own.sum()), whole + float(out.sum())
        return (change / max(whole, TINY)) ** 0.5

    def _stays(self, shown: AttentionInputs) -> Bool[Tensor, " S"]:
        """The tokens of the context that the last of them look at most."""
        voters = torch.arange(self.context - self.window, self.context, device=shown.queries.device)
        votes = shown.weights(voters).sum((0, 1))
        return top_mask(votes.index_fill(0, voters, torch.inf), self.kept)


Part = EvictionErrorMeasurement
