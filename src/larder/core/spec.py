"""Layer and model specs: attention shapes, sharing of layers, recomputation; no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Protocol, TypeVar, runtime_checkable

import torch

from larder.core.arguments import require
from larder.core.errors import BadParameter

IntOrTensor = TypeVar("IntOrTensor", int, torch.Tensor)

POSITION_BYTES = 4  # positions are int32, one per entry


@dataclass(frozen=True)
class LayerSpec:
    """Attention shape of one layer, as measured from the model's own calls.

    Args:
        index: number of the layer among those with attention, from 0.
        query_heads: H.
        kv_heads: K; R = H / K query heads share one.
        head_dim: D, of keys and values alike.
        scaling: factor on the logits, usually 1 / sqrt(D).
        sliding_window: latest tokens, its own included, that a query sees; None sees all.
        radians: RoPE frequencies: rotation per position of each pair of dimensions, as `ops.rope`
            pairs them; empty without rotation, None where unknown.
        kv_source: index of the earlier layer whose keys and values this layer attends to, as in
            Gemma 3n; the layer then holds none. None for keys and values of its own.
        softcap: c of logits c * tanh(logit / c) (Gemma 2); None for logits as they are.
        sinks: logit of each query head that takes part in the softmax and has no value (GPT-OSS);
            empty without sinks.
        chunk: tokens of a chunk; a query sees tokens of its own chunk alone (Llama 4), whose
            number is then the sliding window too. None without chunks.
        latent_rank: of latents (MLA), held once: their first channels are the values; 0 for values
            of their own.
    """

    index: int
    query_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    radians: tuple[float, ...] | None = None
    kv_source: int | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] = ()
    chunk: int | None = None
    latent_rank: int = 0

    def first_visible(self, positions: IntOrTensor) -> IntOrTensor:
        """Position of the first token that queries at true positions of a window see, or below."""
        if self.chunk is not None:
            return positions - positions % self.chunk
        return 0 * positions if self.sliding_window is None else positions - self.sliding_window + 1

    @property
    def is_causal(self) -> bool:
        """True if a query sees all tokens before it, by plain softmax over its own layer's keys."""
        others = self.sliding_window, self.kv_source, self.softcap, self.chunk
        return others == (None, None, None, None) and not (self.sinks or self.latent_rank)

    @property
    def is_managed(self) -> bool:
        """True if a budget governs the layer: entries of its own, and no sliding window."""
        return self.sliding_window is None and self.kv_source is None

    @property
    def group(self) -> int:
        """R, the query heads that share one kv head."""
        return self.query_heads // self.kv_heads

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Key and value bytes of one token in this layer, all kv heads together; 0 if shared."""
        if self.kv_source is not None:
            return 0
        sides = 1 if self.latent_rank else 2
        return sides * self.kv_heads * self.head_dim * dtype.itemsize

    def full_bytes(self, dtype: torch.dtype, tokens: int) -> int:
        """Key and value bytes that a `DynamicCache` holds of `tokens` tokens in this layer.

        Of a sliding window of w tokens it holds w - 1: the next token brings its own entry.
        """
        window = tokens if self.sliding_window is None else self.sliding_window - 1
        return self.bytes_per_token(dtype) * min(tokens, window)


@dataclass(frozen=True)
class RecurrentSpec:
    """One tensor of the state that a recurrent layer keeps per sequence.

    Recurrent layers are those of state-space models, linear attention and short convolutions. The
    size of their state does not depend on the length of the text.

    Args:
        layer: number of the layer in the model.
        name: name of the tensor within the layer.
        shape: without a batch dimension.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class EntryArena(Protocol):
    """Memory that the caches of a model take their entries' storage from."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        ...

    @property
    def page_tokens(self) -> int:
        """Entries of one kv head that are allocated together."""
        ...


@dataclass(frozen=True)
class ModelSpec:
    """Attention layers of a model, and dtype and device of its cache.

    Args:
        layers: layers with attention, numbered from 0 without gaps.
        width: size of a hidden state.
        numbers: number in the model of each of `layers`; empty where these are 0, 1, 2, ...
        recurrent: state of the layers without attention.
        arena: arena of pages that caches of the model hold their entries in; None for none. It
            says nothing about the model, and two specs are equal whatever it is.
        layer_devices: device that computes each of `layers`; empty where `device`, that of the
            input embeddings, computes all.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    fingerprint: str = ""
    width: int = 0
    numbers: tuple[int, ...] = ()
    recurrent: tuple[RecurrentSpec, ...] = ()
    arena: EntryArena | None = field(default=None, compare=False, repr=False)
    layer_devices: tuple[torch.device, ...] = ()

    def device_of(self, index: int) -> torch.device:
        """Device of the entries of a layer."""
        return self.layer_devices[index] if self.layer_devices else self.device

    def of_layer(self, index: int) -> ModelSpec:
        """Specification in which all layers are on the device of one."""
        if not self.layer_devices:
            return self
        return replace(self, device=self.layer_devices[index], layer_devices=())

    @property
    def on_host(self) -> ModelSpec:
        """Specification of caches in host memory, each with storage of its own."""
        return replace(self, device=torch.device("cpu"), arena=None)

    def index_of(self, number: int) -> int:
        """Index in `layers` of the layer with a number in the model."""
        return self._indices.get(number, number)

    def number_of(self, index: int) -> int:
        """Number in the model of a layer by its index in `layers`."""
        return self.numbers[index] if self.numbers else index

    @property
    def can_truncate(self) -> bool:
        """True if a cache can return to any earlier length: it has no window and no state."""
        return not self.recurrent and not self.windows

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of the state of the layers without attention, of one sequence."""
        return sum(tensor.nbytes for tensor in self.recurrent)

    @cached_property
    def _indices(self) -> dict[int, int]:
        return {number: index for index, number in enumerate(self.numbers)}

    @property
    def managed(self) -> tuple[LayerSpec, ...]:
        """Layers that a budget governs: those with entries of their own and no sliding window."""
        return tuple(layer for layer in self.layers if layer.is_managed)

    @property
    def holders(self) -> tuple[LayerSpec, ...]:
        """Layers that hold entries of their own."""
        return tuple(layer for layer in self.layers if layer.kv_source is None)

    @property
    def windows(self) -> tuple[LayerSpec, ...]:
        """Layers that hold a sliding window."""
        return tuple(layer for layer in self.holders if layer.sliding_window is not None)

    @cached_property
    def last_readers(self) -> dict[int, int]:
        """Last layer that attends to another layer's entries, and that other layer, by index."""
        last = {
            layer.kv_source: layer.index for layer in self.layers if layer.kv_source is not None
        }
        return {reader: source for source, reader in last.items()}

    def managed_bytes_per_token(self) -> int:
        """Key and value bytes of one token over the managed layers."""
        return sum(layer.bytes_per_token(self.dtype) for layer in self.managed)

    def full_bytes(self, tokens: int) -> int:
        """Bytes that transformers' own `DynamicCache` holds of `tokens` tokens: keys and values,
        and the state of layers without attention.
        """
        entries = sum(layer.full_bytes(self.dtype, tokens) for layer in self.layers)
        return entries + self.recurrent_bytes


@dataclass(frozen=True)
class LayerPairing:
    """Pairs of successive layers that share the directions of their entries (MiniCache).

    Args:
        start: share of the layers, from the first, that are not paired, in [0, 1].
        weight: weight of the upper layer's direction in the shared one, in [0, 1].
        apart: upper part of the range of angles, in [0, 1], whose entries are not shared.
    """

    start: float = 0.5
    weight: float = 0.6
    apart: float = 0.05

    def __post_init__(self) -> None:
        for name in ("start", "weight", "apart"):
            require(
                0 <= getattr(self, name) <= 1, f"minicache.{name}", "in [0, 1]", getattr(self, name)
            )

    def pairs(self, layers: Sequence[LayerSpec]) -> list[tuple[int, int]]:
        """Indices of paired layers, lower and upper; only layers with equal head shapes pair.

        Args:
            layers: managed layers.
        """
        return self.pairs_of({each.index: (each.kv_heads, each.head_dim) for each in layers})

    def pairs_of(self, shapes: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
        """Indices of paired layers, as `pairs`.

        Args:
            shapes: kv heads and head size of the managed layers, by ascending index.
        """
        deep = list(shapes)[int(self.start * len(shapes)) :]
        return [
            (lower, upper)
            for lower, upper in zip(deep[::2], deep[1::2], strict=False)
            if shapes[lower] == shapes[upper]
        ]


class RecomputeSource(Enum):
    """Stored source from which keys and values of an evicted token are recomputed.

    EVERY: one residual per layer, projected again.
    ONE: one residual, and the entries of the layers before it; layers from there on run again.
    IDS: the token id; all layers run again.
    """

    EVERY = "every"
    ONE = "one"
    IDS = "ids"


@dataclass(frozen=True)
class RecomputeSpec:
    """Recomputation of evicted entries.

    Args:
        source: stored source of an evicted token.
        layer: layer whose input is stored, for `RecomputeSource.ONE`.

    Raises:
        BadParameter: `layer` is below 1: the input of the first layer is given by the token ids.
    """

    source: RecomputeSource = RecomputeSource.EVERY
    layer: int = 1

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise BadParameter(
                f"recompute.depth must be at least 1, got {self.layer}: the input of layer 0 "
                "follows from the token ids, take held='ids'."
            )

    @property
    def depth(self) -> int:
        """Number of first layers that hold all of their entries."""
        return self.layer if self.source is RecomputeSource.ONE else 0

    @property
    def rereads(self) -> bool:
        """True if the model runs over all tokens again, in order."""
        return self.source is not RecomputeSource.EVERY

    def to_text(self) -> str:
        """Text form, as sessions save it."""
        return f"{self.source.value} {self.layer}"

    @staticmethod
    def from_text(text: str) -> RecomputeSpec:
        """Spec from its text form."""
        source, layer = text.split()
        return RecomputeSpec(RecomputeSource(source), int(layer))
