"""Cost of a cached token: bytes to hold its source, operations to recompute its keys and values.

One residual per token is small because that of one layer serves all; recomputing without attention
needs the residual of every layer, which under grouped queries is larger than keys and values.
Sliding-window layers are counted like all others: a cache drops what left their window, so that
per token of a long text they cost nothing whatever the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from larder.core.spec import ModelSpec

ID_BYTES = 4


class KVSource(Enum):
    """Source of a token's keys and values.

    ENTRIES: the keys and values themselves.
    IDS: the token id; the text is read again from the start.
    ONE: one residual, and the entries of the layers before it; the text is read again from there.
    EVERY: a residual per layer; each is projected.
    """

    ENTRIES = "entries"
    IDS = "ids"
    ONE = "one"
    EVERY = "every"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with gated feed-forward layers.

    Args:
        hidden: width of the residual stream.
        inner: width of a feed-forward layer.
        itemsize: bytes of a number.
    """

    layers: int
    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2

    @staticmethod
    def of(config: Any, spec: ModelSpec) -> ModelShape:
        """Sizes of a model from its configuration in transformers."""
        text, layer = config.get_text_config(), spec.layers[0]
        return ModelShape(
            layers=len(spec.layers),
            hidden=text.hidden_size,
            inner=text.intermediate_size,
            query_heads=layer.query_heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            itemsize=spec.dtype.itemsize,
        )

    def bytes_per_token(self, source: KVSource, depth: int = 0) -> int:
        """Bytes of one token, summed over all layers.

        Args:
            depth: layer before which the one residual is recorded.
        """
        entries = 2 * self.kv_heads * self.head_dim * self.itemsize
        residual = self.hidden * self.itemsize
        return {
            KVSource.ENTRIES: self.layers * entries,
            KVSource.IDS: ID_BYTES,
            KVSource.ONE: depth * entries + residual,
            KVSource.EVERY: self.layers * residual,
        }[source]

    def operations_per_token(self, source: KVSource, tokens: int, depth: int = 0) -> int:
        """Mean multiplications and additions that recompute one token's keys and values.

        Norms and rotations are not counted. The counts follow the implementation: projecting also
        computes queries, and reading again also finishes the last layer.

        Args:
            tokens: S, length of the text that is recomputed from its start.
        """
        if source is KVSource.ENTRIES:
            return 0
        if source is KVSource.EVERY:
            return self.layers * self.projections
        again = self.layers - (depth if source is KVSource.ONE else 0)
        attention = 2 * self.query_heads * self.head_dim * (tokens + 1)
        return again * (self.projections + self.mlp + attention)

    @property
    def projections(self) -> int:
        """Operations of one layer on one token before attention."""
        return 2 * self.hidden * self.head_dim * (self.query_heads + 2 * self.kv_heads)

    @property
    def mlp(self) -> int:
        """Operations of one layer on one token after attention."""
        return 2 * self.hidden * (self.query_heads * self.head_dim + 3 * self.inner)


GEMMA_3_4B = ModelShape(34, 2560, 10240, 8, 4, 256)
LLAMA_3_1_8B = ModelShape(32, 4096, 14336, 32, 8, 128)
QWEN_3_0_6B = ModelShape(28, 1024, 3072, 16, 8, 128)
