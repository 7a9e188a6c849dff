"""Weights and sizes of a decoder layer of the Llama family, as kernels of its layers read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerTensors:
    """Weights of one layer, by reference; None where the architecture has none."""

    input_norm: Tensor
    output_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer.

    Args:
        hidden, inner: numbers of a state, and of an activation inside the gated layers.
        epsilon: of its norms.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
