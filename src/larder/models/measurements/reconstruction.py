"""Reconstruction score of a head: its highest attention on a text while the model repeats it.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025),
arXiv:2505.23416, section 4, context-independent eviction: an entry's score is the highest weight
on it while the text is repeated, as in the scorer `reconstruct`, and a head's score is the maximum
over its entries. One text is enough, and heads are separated as in DuoAttention.

The input is plain text: the bundled text, a request and the text again; the paper uses chunks of a
book of 88000 tokens and the model's chat template. The first `sinks` tokens do not count, as the
paper leaves the system prompt out: what every head attends to does not distinguish heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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

REQUEST = "\n\nRepeat the previous context exactly.\n\n"


@dataclass(frozen=True)
class Reconstruction(Measurement):
    """Highest weight of a token of the copy on a token of the original, per kv head.

    Args:
        tokens: length of the text.
        sinks: tokens at its start that do not count.
    """

    tokens: int = 1024
    sinks: int = 4
    granularity = Granularity.KV_HEAD

    def __post_init__(self) -> None:
        if not 0 <= self.sinks < self.tokens:
            raise BadParameter(f"reconstruction needs 0 <= sinks < tokens, got {self}.")

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        text = sample.ids(self.tokens)
        ids = (*text, *sample.encode(REQUEST), *text)
        copy = torch.arange(len(ids) - len(text), len(ids), device=decoder.spec.device)

        def measure(inputs: AttentionInputs) -> list[float]:
            best = [
                softmax_weights(inputs, rows)[..., self.sinks : self.tokens].amax((1, 2))  # [H]
                for rows in copy.split(CHUNK_TOKENS)
            ]
            return head_maxima(torch.stack(best).amax(0), inputs)

        return measure_layers(decoder, ids, measure)


Part = Reconstruction
