"""Decoder layer of the Llama family around its attention on a GPU: torch's products, and three
Triton kernels in place of the many small ones of norms, rotation, activation and residuals.

They round to bfloat16 where transformers' layers do. Nothing is read on the host, so that steps
may be captured.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import BFloat16
from torch import Tensor
from torch.nn.functional import linear

from larder.ops.decoder_layer import LayerSizes, LayerTensors
from larder.ops.gpu.launch import launch

MAX_HIDDEN = 1 << 14  # numbers of a state, which one program holds
ACTIVATION_BLOCK = 1024


class DeviceLayerRows:
    """States of rows on their way through the layers. Not thread-safe.

    Args:
        states: input of the first layer; copied.
        cosines, sines: of the rotation of each row.
    """

    def __init__(
        self,
        sizes: LayerSizes,
        states: BFloat16[Tensor, "N hidden"],
        cosines: BFloat16[Tensor, "N D"],
        sines: BFloat16[Tensor, "N D"],
    ) -> None:
        self._sizes = sizes
        self._states = states.clone(memory_format=torch.contiguous_format)
        self._added: Tensor | None = None  # output of the latest layer's last product
        self._angles = cosines.contiguous(), sines.contiguous()

    @property
    def states(self) -> BFloat16[Tensor, "N hidden"]:
        """States behind the latest layer."""
        return self._states if self._added is None else self._states + self._added

    def attention_inputs(
        self, layer: LayerTensors
    ) -> tuple[BFloat16[Tensor, "H N D"], BFloat16[Tensor, "K N D"], BFloat16[Tensor, "K N D"]]:
        """Rotated queries and keys, and values of a layer; views of [N, heads, D]."""
        sizes, normed = self._sizes, self._add_and_norm(layer.input_norm)
        queries = linear(normed, layer.query, layer.query_bias)
        keys = linear(normed, layer.key, layer.key_bias)
        values = linear(normed, layer.value, layer.value_bias)
        rows, dim = len(queries), sizes.head_dim
        norms = layer.query_norm, layer.key_norm
        has_norm = norms[0] is not None
        launch(
            _rotate,
            (rows, sizes.heads + sizes.kv_heads),
            queries,
            keys,
            *(self._angles if not has_norm else norms),
            *self._angles,
            sizes.heads,
            sizes.kv_heads,
            sizes.epsilon,
            D=dim,
            HALF=triton.next_power_of_2(dim // 2),
            HAS_NORM=has_norm,
        )
        heads = (side.view(rows, -1, dim).transpose(0, 1) for side in (queries, keys, values))
        query_heads, key_heads, value_heads = heads
        return query_heads, key_heads, value_heads

    def finish_layer(self, layer: LayerTensors, attended: BFloat16[Tensor, "H N D"]) -> None:
        """Pass the states through what stands behind the attention of a layer."""
        wide = attended.transpose(0, 1).flatten(1)
        self._added = linear(wide, layer.output, layer.output_bias)
        normed = self._add_and_norm(layer.output_norm)
        gates, ups = linear(normed, layer.gate), linear(normed, layer.up)
        grid = (triton.cdiv(gates.numel(), ACTIVATION_BLOCK),)
        launch(_gate, grid, gates, ups, gates.numel(), BLOCK=ACTIVATION_BLOCK)
        self._added = linear(gates, layer.down)

    def _add_and_norm(self, weight: Tensor) -> BFloat16[Tensor, "N hidden"]:
        """Add what the latest product gave to the states, and return their norm."""
        states, added = self._states, self._added
        normed, hidden = torch.empty_like(states), self._sizes.hidden
        launch(
            _add_norm,
            (len(states),),
            states,
            states if added is None else added,
            weight,
            normed,
            hidden,
            self._sizes.epsilon,
            HAS_ADDED=added is not None,
            BLOCK=triton.next_power_of_2(hidden),
        )
        self._added = None
        return normed


def are_supported(sizes: LayerSizes) -> bool:
    """True if the kernels take layers of such sizes."""
    return sizes.hidden <= MAX_HIDDEN and sizes.head_dim % 2 == 0


@triton.jit
def _add_norm(
    states, added, weight, normed, hidden, epsilon, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + offsets
    own = tl.load(states + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        own += tl.load(added + at, mask=mask, other=0.0).to(tl.float32)
        rounded = own.to(tl.bfloat16)
        tl.store(states + at, rounded, mask=mask)
        own = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own, 0) / hidden + epsilon)
    unit = (own * scale).to(tl.bfloat16).to(tl.float32)
    weights = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + at, (unit * weights).to(tl.bfloat16), mask=mask)


@triton.jit
def _rotate(
    queries,
    keys,
    query_norm,
    key_norm,
    cosines,
    sines,
    heads,
    kv_heads,
    epsilon,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    offsets = tl.arange(0, HALF)
    mask = offsets < D // 2
    is_key = head >= heads
    if is_key:
        base = keys + (row * kv_heads + head - heads).to(tl.int64) * D
    else:
        base = queries + (row * heads + head).to(tl.int64) * D
    left = tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(base + D // 2 + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / D + epsilon)
        if is_key:
            weight = key_norm
        else:
            weight = query_norm
        left = (left * scale).to(tl.bfloat16).to(tl.float32)
        right = (right * scale).to(tl.bfloat16).to(tl.float32)
        left *= tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
        right *= tl.load(weight + D // 2 + offsets, mask=mask, other=0.0).to(tl.float32)
        left = left.to(tl.bfloat16).to(tl.float32)
        right = right.to(tl.bfloat16).to(tl.float32)
    angles = row * D + offsets
    cosine = tl.load(cosines + angles, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sines + angles, mask=mask, other=0.0).to(tl.float32)
    rotated = (left * cosine).to(tl.bfloat16).to(tl.float32)
    rotated -= (right * sine).to(tl.bfloat16).to(tl.float32)
    tl.store(base + offsets, rotated.to(tl.bfloat16), mask=mask)
    cosine = tl.load(cosines + angles + D // 2, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sines + angles + D // 2, mask=mask, other=0.0).to(tl.float32)
    rotated = (right * cosine).to(tl.bfloat16).to(tl.float32)
    rotated += (left * sine).to(tl.bfloat16).to(tl.float32)
    tl.store(base + D // 2 + offsets, rotated.to(tl.bfloat16), mask=mask)


@triton.jit
def _gate(gates, ups, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    gate = tl.load(gates + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(ups + at, mask=mask, other=0.0).to(tl.float32)
    active = (gate * tl.sigmoid(gate)).to(tl.bfloat16).to(tl.float32)
    tl.store(gates + at, (active * up).to(tl.bfloat16), mask=mask)
