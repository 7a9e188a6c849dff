"""What a model's cache looks like, known before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
