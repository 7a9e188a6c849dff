"""Provider of LoCoCo's convolution of each layer.

Cai, Tian, Wang, Chen, "LoCoCo: Dropping In Convolutions for Long Context Compression" (2024),
arXiv:2406.05317.
"""

from __future__ import annotations

from larder.core.spec import LayerSpec
from larder.core.types import NamedTensors, TensorShapes
from larder.policy.providers.base import LearnedProvider


class SlotConvolution(LearnedProvider):
    """Inputs `lococo.kernel`, `lococo.bias` and `lococo.gamma`."""

    def shapes(self, layer: LayerSpec, width: int, tensors: NamedTensors) -> TensorShapes:
        channels, _, taps = tensors["kernel"].shape
        kernel = channels, 2 * layer.head_dim, taps
        return {"kernel": kernel, "bias": (channels,), "gamma": ()}


Part = SlotConvolution
