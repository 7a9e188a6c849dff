"""What is lost when a head sees the first tokens and the latest only, while facts are looked up.

Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads"
(2024), arXiv:2410.10819, section 3.2. The paper trains a gate for each kv head, so that the model's
last hidden states on passkeys stay what they were with as few open gates as possible. Nothing is
trained here: each kv head is closed by itself, and the error is that of its layer's attention,
before the output projection, where the answers are written; what comes behind the layer is left
out, so that one pass measures all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
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
from larder.models.measurements._needles import NeedleSettings
from larder.models.measurements.base import Granularity, Measurement, SampleText


@dataclass(frozen=True)
class StreamingError(Measurement):
    """The change of a layer's output by its size, one number per kv head.

    Args:
        sinks: first tokens that a closed head sees.
        recent: the latest tokens that it sees, its own included.
        needles: how the text is made.
    """

    sinks: int = 16
    recent: int = 64
    needles: NeedleSettings = NeedleSettings()
    granularity = Granularity.KV_HEAD

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise BadParameter(f"A closed head sees 1 recent token or more, got {self}.")

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        passage = self.needles.passage(sample)
        asking = torch.tensor(passage.asking, device=decoder.spec.device)
        numbers: dict[int, list[float]] = {}

        def show(layer: int, shown: AttentionInputs) -> None:
            parts = [shown.squares(rows, self._seen(rows)) for rows in asking.split(CHUNK_TOKENS)]
            change = torch.stack([own for own, _ in parts]).sum(0)
            whole = torch.stack([out for _, out in parts]).sum()
            numbers[layer] = (change / whole.clamp(min=TINY)).sqrt().tolist()

        capture_attention(decoder, passage.ids, show)
        return flatten_layers(decoder, numbers)

    def _seen(self, rows: Int[Tensor, " Q"]) -> Bool[Tensor, "Q S"]:
        """What a closed head sees for each of some tokens."""
        places = torch.arange(int(rows.max()) + 1, device=rows.device)
        return (places < self.sinks) | (places > rows[:, None] - self.recent)


Part = StreamingError
