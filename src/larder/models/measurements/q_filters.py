"""Main direction of the queries of each kv head (Q-Filters).

Godey et al., "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression" (2025),
arXiv:2503.02812, section 3: the first right singular vector of a sample of a head's queries after
rotation, with the sign under which most of them project positively, averaged over the query heads
of a kv head. The paper samples 3,000 queries per head of 20 texts of 2,048 tokens; the bundled text
gives all of its queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.types import Queries
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import measure_layers
from larder.models.measurements.base import Granularity, Measurement, SampleText


@dataclass(frozen=True)
class QFiltersMeasurement(Measurement):
    """Direction of each kv head, one number per channel of its keys.

    Args:
        tokens: length of the text.
        skipped: tokens at its start that do not count: the first is unlike all others.
    """

    tokens: int = 2048
    skipped: int = 4
    granularity = Granularity.KEY_CHANNEL

    def __post_init__(self) -> None:
        if not 0 <= self.skipped < self.tokens:
            raise BadParameter(f"q_filters needs 0 <= skipped < tokens, got {self}.")

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        def show(inputs: AttentionInputs) -> list[float]:
            directions = query_directions(inputs.queries[:, self.skipped :].float())
            return directions.unflatten(0, (inputs.keys.shape[0], -1)).mean(1).flatten().tolist()

        return measure_layers(decoder, sample.ids(self.tokens), show)


def query_directions(queries: Queries) -> Float[Tensor, "H D"]:
    """First right singular vector of the queries of each head, on the side of most of them."""
    squares = queries.transpose(1, 2) @ queries  # [H, D, D]
    vectors = torch.linalg.eigh(squares).eigenvectors[..., -1]
    projections = (queries @ vectors[..., None])[..., 0]
    most = (projections > 0).float().mean(1, keepdim=True) >= 0.5
    return torch.where(most, vectors, -vectors)


Part = QFiltersMeasurement
