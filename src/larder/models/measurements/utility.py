"""Utility curve of a head: share of later attention that its best entries by a score receive.

Tang et al., "Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV
Cache Eviction" (2026), arXiv:2602.08585. Of one text, the entries of a context are ranked by the
scorer `expected` (epsilon .02, 4 sinks, the default of NVIDIA/kvpress 0.5.5), and each curve says
how much of the utility of all entries of the layer the best 1/16, 2/16, ... of a head hold.

Inferred: an entry's utility is the attention of the tokens behind the context to it, times the
length of its value, over the query heads of its group; a layer's sum is 1, so that layers count
alike. Sinks and the newest token do not count, since they always stay. The authors average curves
over contexts of data sets; here one bundled text gives them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.observation import Entries, Observation
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import (
    CHUNK_TOKENS,
    TINY,
    measure_layers,
    softmax_weights,
)
from larder.models.measurements.base import Granularity, Measurement, SampleText
from larder.policy.budgets.lukv import CURVE_POINTS
from larder.policy.scorers.expected import Expected


@dataclass(frozen=True)
class Utility(Measurement):
    """Utility of the best entries of each kv head, as `CURVE_POINTS` shares of its layer's.

    Args:
        context: tokens of the context.
        following: tokens behind it whose attention makes utility.
        sinks: first tokens that do not count.
        epsilon: of the scorer `expected`.
    """

    context: int = 1024
    following: int = 512
    sinks: int = 4
    epsilon: float = 0.02
    granularity = Granularity.KV_HEAD_CURVE

    def __post_init__(self) -> None:
        if not 0 <= self.sinks < self.context - CURVE_POINTS or self.following < 1:
            raise BadParameter(
                f"utility needs sinks >= 0, context > sinks + {CURVE_POINTS} and following >= 1, "
                f"got {self}."
            )

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        ids = sample.ids(self.context + self.following)
        return measure_layers(decoder, ids, lambda shown: self._curves(decoder, shown))

    def _curves(self, decoder: Decoder, inputs: AttentionInputs) -> list[float]:
        """Curves of a layer's heads, one after the other."""
        span = slice(self.sinks, self.context - 1)
        ranks = self._scores(decoder, inputs)[:, span].argsort(descending=True, stable=True)
        gains = self._utilities(inputs)[:, span].gather(1, ranks).double()
        held = gains.cumsum(1) / gains.sum().clamp(min=TINY)
        count = held.shape[1]
        ends = [-(-count * point // CURVE_POINTS) - 1 for point in range(1, CURVE_POINTS + 1)]
        return held[:, ends].flatten().tolist()

    def _scores(self, decoder: Decoder, inputs: AttentionInputs) -> Float[Tensor, "K S"]:
        """Score of each entry of the context, as the context's own queries give it."""
        heads, device = inputs.keys.shape[0], inputs.keys.device
        keys, values = (
            side[:, : self.context].flatten(0, 1) for side in (inputs.keys, inputs.values)
        )
        positions = torch.arange(self.context, dtype=torch.int32, device=device)
        starts = tuple(head * self.context for head in range(heads))
        entries = Entries(keys, values, positions.repeat(heads), starts, (self.context,) * heads)
        observation = Observation(
            decoder.spec.layers[inputs.layer],
            entries,
            inputs.queries[:, : self.context],
            positions,
            self.context,
            (0, self.context),
        )
        scorer = Expected(sinks=self.sinks, epsilon=self.epsilon)
        return scorer.score(observation).view(heads, self.context)

    def _utilities(self, inputs: AttentionInputs) -> Float[Tensor, "K S"]:
        """Attention of the following tokens to each entry, times the length of its value."""
        heads, device = inputs.keys.shape[0], inputs.keys.device
        mass = torch.zeros(heads, self.context, device=device)
        total = self.context + self.following
        for rows in torch.arange(self.context, total, device=device).split(CHUNK_TOKENS):
            weights = softmax_weights(inputs, rows)[..., : self.context].sum(1)  # [H, S]
            mass += weights.unflatten(0, (heads, -1)).sum(1)
        return mass * inputs.values[:, : self.context].float().norm(dim=-1)


Part = Utility
