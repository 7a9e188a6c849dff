"""Retrieval score of a head: its attention on a hidden sentence while the model quotes from it.

Wu et al., "Retrieval Head Mechanistically Explains Long-Context Factuality" (2024),
arXiv:2404.15574, count how often a head's highest weight is on the token that is generated next;
so do Fu et al., "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated
Retrieval and Reasoning" (2024), arXiv:2410.19258 (HeadKV). Lin et al., "CompressKV: Semantic
Retrieval Heads Know What Tokens are Not Important Before Generation" (2025), arXiv:2508.02401, add
up the weights on the whole sentence over all steps of the answer, as is done here: heads that
attend to a sentence without copying from it count too.

In the papers the model answers, and wrong answers are left out. Here the answer is part of the
text, so that any model can be measured, even a small or random one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import measure_layers, softmax_weights
from larder.models.measurements._needles import NeedleSettings
from larder.models.measurements.base import Granularity, Measurement, SampleText


@dataclass(frozen=True)
class RetrievalMeasurement(Measurement):
    """Mean weight on the sentence of the question, one number per query head.

    Args:
        needles: settings of the text.
    """

    needles: NeedleSettings = NeedleSettings()
    granularity = Granularity.QUERY_HEAD

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        passage = self.needles.passage(sample)

        def measure(inputs: AttentionInputs) -> list[float]:
            sums = torch.zeros(inputs.queries.shape[0], dtype=torch.float64)
            for each in passage.needles:
                rows = torch.tensor(each.predicting, device=inputs.queries.device)
                on_needle = softmax_weights(inputs, rows)[:, :, slice(*each.needle)]
                sums += on_needle.sum((1, 2)).double().cpu()
            return (sums / len(passage.predicting)).tolist()

        return measure_layers(decoder, passage.ids, measure)


Part = RetrievalMeasurement
