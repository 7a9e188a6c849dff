"""Echo and induction scores of a head, measured on a random text that repeats itself.

Tang et al., "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads" (2024),
arXiv:2407.15891, section 3.2: echo heads attend to earlier occurrences of the same token, induction
heads (`induction`) to their successors. The score of a kv head is the maximum over its query heads,
as documented by Huawei's msModelSlim, which ships the method. It takes the mean over pairs of
repetitions; here the weights on all earlier repetitions are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import (
    CHUNK_TOKENS,
    head_maxima,
    measure_layers,
    softmax_weights,
)
from larder.models.measurements.base import Granularity, Measurement, SampleText

SEED = 0


@dataclass(frozen=True)
class Echo(Measurement):
    """Weight on the same token in earlier repetitions of a text, the mean over tokens.

    One number per kv head, the maximum over its query heads.

    Args:
        tokens: length of the repeated text. Drawn from the tokens of the bundled text, each once
            before any repeats, so that special tokens do not occur.
        times: number of repetitions.
    """

    tokens: int = 500
    times: int = 4
    granularity = Granularity.KV_HEAD
    offset: ClassVar[int] = 0  # distance from the token's own position in an earlier repetition

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.times < 2:
            raise BadParameter(f"A repeated text needs tokens >= 2 and times >= 2, got {self}.")

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        ids = random_tokens(sample.token_ids(), self.tokens) * self.times
        return measure_layers(decoder, ids, lambda shown: head_maxima(self._mass(shown), shown))

    def _mass(self, inputs: AttentionInputs) -> Float[Tensor, " H"]:
        """Mean over the tokens of all repetitions but the first."""
        device = inputs.queries.device
        rows = torch.arange(self.tokens, self.tokens * self.times, device=device)
        sums = torch.zeros(inputs.queries.shape[0], dtype=torch.float64, device=device)
        back = self.tokens * torch.arange(1, self.times, device=device)
        for some in rows.split(CHUNK_TOKENS):
            indices = some[:, None] - back  # [Q, readings]
            found = softmax_weights(inputs, some).gather(
                2, (indices + self.offset).clamp(min=0).expand(len(sums), -1, -1)
            )
            sums += found.masked_fill(indices < 0, 0.0).sum((1, 2)).double()
        return (sums / len(rows)).float()


@dataclass(frozen=True)
class Induction(Echo):
    """Weight on the successor of the same token in earlier repetitions of a text."""

    offset = 1


def random_tokens(known: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Random token ids with a fixed seed."""
    source, ids = torch.Generator().manual_seed(SEED), list[int]()
    while len(ids) < tokens:
        ids += [known[index] for index in torch.randperm(len(known), generator=source).tolist()]
    return tuple(ids[:tokens])


Part = Echo
