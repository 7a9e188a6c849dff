"""Streaming error of a head: change of its output if it sees only sinks and recent tokens.

Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads"
(2024), arXiv:2410.10819, section 3.2. The paper trains a gate for each kv head, so that the model's
last hidden states on passkeys stay the same with as few open gates as possible. Nothing is trained
here: each kv head is restricted separately, and the error is that of its layer's attention output
before the projection, at the tokens that predict answers; later layers are not considered, so that
one forward measures all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from larder.core.errors import BadParameter
from larder.models.attention_backend import AttentionInputs
from larder.models.decoder import Decoder
from larder.models.measurements._attention_capture import (
    CHUNK_TOKENS,
    TINY,
    measure_layers,
    squared_errors,
)
from larder.models.measurements._needles import NeedleSettings
from larder.models.measurements.base import Granularity, Measurement, SampleText


@dataclass(frozen=True)
class StreamingError(Measurement):
    """Norm of the change of a layer's output over the norm of the output, one number per kv head.

    Args:
        sinks: first tokens that a restricted head sees.
        recent: latest tokens that it sees, its own included, at least 1.
        needles: settings of the text.
    """

    sinks: int = 16
    recent: int = 64
    needles: NeedleSettings = NeedleSettings()
    granularity = Granularity.KV_HEAD

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise BadParameter(f"streaming_error needs sinks >= 0 and recent >= 1, got {self}.")

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        passage = self.needles.passage(sample)
        asking = torch.tensor(passage.predicting, device=decoder.spec.device)

        def measure(inputs: AttentionInputs) -> list[float]:
            parts = [
                squared_errors(inputs, rows, self._seen(rows))
                for rows in asking.split(CHUNK_TOKENS)
            ]
            change = torch.stack([error for error, _ in parts]).sum(0)
            whole = torch.stack([out for _, out in parts]).sum()
            return (change / whole.clamp(min=TINY)).sqrt().tolist()

        return measure_layers(decoder, passage.ids, measure)

    def _seen(self, rows: Int[Tensor, " Q"]) -> Bool[Tensor, "Q S"]:
        """Mask of the tokens that a restricted head sees."""
        positions = torch.arange(int(rows.max()) + 1, device=rows.device)
        return (positions < self.sinks) | (positions > rows[:, None] - self.recent)


Part = StreamingError
