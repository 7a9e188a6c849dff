"""Squeeze score of a layer: mean cosine of hidden states before and after its attention.

Wang et al., "SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal
Budget" (2024), arXiv:2404.04793, section 4.1: hidden states before a layer's attention, and after
its output is added. The paper measures every prompt during prefill; here the bundled text is
measured once, because budgets are assigned before prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from larder.core.arguments import require
from larder.core.errors import ModelError
from larder.models.attention_backend import AttentionInputs, CausalAttention
from larder.models.decoder import Decoder
from larder.models.measurements.base import Granularity, Measurement, SampleText

# Norm between a layer's attention and its MLP; of a model with both names, the first.
BETWEEN = ("pre_feedforward_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class SqueezeMeasurement(Measurement):
    """Mean cosine per layer, 1 where attention adds nothing.

    Args:
        tokens: length of the text.
    """

    tokens: int = 1024
    granularity = Granularity.LAYER

    def __post_init__(self) -> None:
        require(self.tokens >= 1, "squeeze.tokens", "1 or more", self.tokens)

    def measure(self, decoder: Decoder, sample: SampleText) -> tuple[float, ...]:
        with _cosines(decoder.body) as cosines:
            decoder.forward_uncached(sample.ids(self.tokens), CausalAttention(_ignore))
        spec = decoder.spec
        return tuple(cosines[spec.number_of(layer.index)] for layer in spec.managed)


def _ignore(inputs: AttentionInputs) -> None:
    del inputs


@contextmanager
def _cosines(model: nn.Module) -> Iterator[dict[int, float]]:
    """Cosine of each layer by index, filled in during a forward of the model.

    Raises:
        ModelError: a layer has no norm of a known name behind its attention.
    """
    before: dict[int, Tensor] = {}
    cosines: dict[int, float] = {}
    layers = dict(model.named_children()).get("layers", nn.ModuleList())
    handles: list[Any] = []
    try:
        for index, layer in enumerate(layers.children()):
            parts = dict(layer.named_children())
            norm = next((parts[name] for name in BETWEEN if name in parts), None)
            if norm is None:
                break

            def enter(module: Any, args: Any, kwargs: Any, index: int = index) -> None:
                before[index] = args[0] if args else kwargs["hidden_states"]

            def leave(module: Any, args: Any, index: int = index) -> None:
                pairs = F.cosine_similarity(before.pop(index).float(), args[0].float(), dim=-1)
                cosines[index] = float(pairs.mean())

            handles += [
                layer.register_forward_pre_hook(enter, with_kwargs=True),
                norm.register_forward_pre_hook(leave),
            ]
        if not handles or len(handles) != 2 * len(list(layers.children())):
            raise ModelError(
                f"{type(model).__name__} has a layer without a norm behind its attention "
                f"({' or '.join(BETWEEN)}), which squeeze() needs: choose another budget."
            )
        yield cosines
    finally:
        for handle in handles:
            handle.remove()


Part = SqueezeMeasurement
