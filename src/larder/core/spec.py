"""What a model's cache looks like, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from larder.core.errors import BadParameter

POSITION_BYTES = 4  # positions are held as int32, one per entry


@dataclass(frozen=True)
class LayerSpec:
    """The attention of one layer, as the model really calls it.

    Args:
        index: the layer's number, from 0.
        query_heads: H.
        kv_heads: K; R = H / K query heads share one.
        head_dim: D, of keys and values alike.
        scaling: factor on the logits, usually 1 / sqrt(D).
        sliding_window: how many of the last tokens, itself included, a query sees; None sees all.
        radians: by how much a position turns each pair of dimensions of queries and keys, as
            `ops.rope` pairs them; empty where nothing is turned, None where it is not known.
    """

    index: int
    query_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    radians: tuple[float, ...] | None = None

    @property
    def group(self) -> int:
        """R, the query heads that share one kv head."""
        return self.query_heads // self.kv_heads

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes in this layer, all kv heads together."""
        return 2 * self.kv_heads * self.head_dim * dtype.itemsize

    def full_bytes(self, dtype: torch.dtype, tokens: int) -> int:
        """Key and value bytes of `tokens` tokens in this layer, its window respected."""
        window = tokens if self.sliding_window is None else self.sliding_window
        return self.bytes_per_token(dtype) * min(tokens, window)


@dataclass(frozen=True)
class ModelSpec:
    """All layers of a model, and the type its cache is held in.

    Args:
        width: numbers of a hidden state, of which a cache may hold the last.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    fingerprint: str = ""
    width: int = 0

    @property
    def managed(self) -> tuple[LayerSpec, ...]:
        """The layers that a budget governs: those that see everything."""
        return tuple(layer for layer in self.layers if layer.sliding_window is None)

    def managed_bytes_per_token(self) -> int:
        """Key and value bytes of one token over the managed layers."""
        return sum(layer.bytes_per_token(self.dtype) for layer in self.managed)

    def full_bytes(self, tokens: int) -> int:
        """Key and value bytes of a plain cache that holds `tokens` tokens, windows respected."""
        return sum(layer.full_bytes(self.dtype, tokens) for layer in self.layers)


@dataclass(frozen=True)
class LayerPairing:
    """From some depth on, two layers after each other share the directions of their entries.

    Args:
        start: share of the layers, counted from the first, that stay by themselves.
        weight: of the upper layer's direction in the shared one, in [0, 1].
        apart: entries whose directions differ most are not shared: those in this upper part of
            the range of their angles.
    """

    start: float = 0.5
    weight: float = 0.6
    apart: float = 0.05

    def __post_init__(self) -> None:
        for name in ("start", "weight", "apart"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadParameter(
                    f"minicache.{name} must be in [0, 1], got {getattr(self, name)}."
                )

    def pairs(self, layers: Sequence[LayerSpec]) -> list[tuple[int, int]]:
        """Indices of the layers that share, lower and upper; heads must be alike.

        Args:
            layers: those that the budget governs.
        """
        deep = layers[int(self.start * len(layers)) :]
        return [
            (lower.index, upper.index)
            for lower, upper in zip(deep[::2], deep[1::2], strict=False)
            if (lower.kv_heads, lower.head_dim) == (upper.kv_heads, upper.head_dim)
        ]


class RecomputeSource(Enum):
    """What stands for a token whose keys and values are not held.

    EVERY: a residual per layer; projected.
    ONE: one residual, and the entries of the layers before it; read again from there.
    IDS: its token id; read again from the start.
    """

    EVERY = "every"
    ONE = "one"
    IDS = "ids"


@dataclass(frozen=True)
class RecomputeSpec:
    """How rejected entries come back.

    Args:
        manner: what stands for them.
        layer: before which the one residual is, where there is one.

    Raises:
        BadParameter: before the first layer stand the ids.
    """

    source: RecomputeSource = RecomputeSource.EVERY
    layer: int = 1

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise BadParameter(
                f"recompute.depth must be at least 1, got {self.layer}: before layer 0 the token "
                "ids say as much, take held='ids'."
            )

    @property
    def depth(self) -> int:
        """How many layers hold all of their entries."""
        return self.layer if self.source is RecomputeSource.ONE else 0

    @property
    def rereads(self) -> bool:
        """Whether tokens are read again, all of them in order."""
        return self.source is not RecomputeSource.EVERY

    def to_text(self) -> str:
        """All of it as text."""
        return f"{self.source.value} {self.layer}"

    @staticmethod
    def from_text(text: str) -> RecomputeSpec:
        """What `told` gave."""
        manner, layer = text.split()
        return RecomputeSpec(RecomputeSource(manner), int(layer))
