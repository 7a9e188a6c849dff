"""What holding a token costs in bytes, and getting its keys and values back in operations.

One residual a token is small because one layer's stands for all; whoever wants keys and values back
without attention needs that of every layer, which under grouped queries takes more than they do.
Layers that slide a window are counted like all others: a cache drops what they cannot see any more,
so that per token of a long text they cost nothing in any manner.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from larder.core.spec import ModelSpec

ID_BYTES = 4


class KVSource(Enum):
    """What stands for the keys and values of a token.

    ENTRIES: they themselves.
    IDS: its token id; read again from the start.
    ONE: one residual, and the entries of the layers before it; read again from there.
    EVERY: a residual per layer; projected.
    """

    ENTRIES = "entries"
    IDS = "ids"
    ONE = "one"
    EVERY = "every"


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated feed-forward layers, by its sizes.

    Args:
        hidden: numbers of a residual.
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
        """That of a model, by its configuration in transformers."""
        text, layer = config.get_text_config(), spec.layers[0]
        heads = layer.query_heads, layer.kv_heads, layer.head_dim
        sizes = len(spec.layers), text.hidden_size, text.intermediate_size
        return ModelShape(*sizes, *heads, spec.dtype.itemsize)

    def bytes_per_token(self, held: KVSource, depth: int = 0) -> int:
        """Bytes that one token takes, all layers together.

        Args:
            depth: before which layer the one residual is taken.
        """
        entries = 2 * self.kv_heads * self.head_dim * self.itemsize
        residual = self.hidden * self.itemsize
        return {
            KVSource.ENTRIES: self.layers * entries,
            KVSource.IDS: ID_BYTES,
            KVSource.ONE: depth * entries + residual,
            KVSource.EVERY: self.layers * residual,
        }[held]

    def operations_per_token(self, held: KVSource, tokens: int, depth: int = 0) -> int:
        """Multiplications and additions that give one token's keys and values back, on average.

        Norms and rotations are left out. Both ways are counted as they are run: projecting makes
        queries, too, and reading again finishes the last layer.

        Args:
            tokens: S, of the text that is rebuilt from its start.
        """
        if held is KVSource.ENTRIES:
            return 0
        if held is KVSource.EVERY:
            return self.layers * self.projections
        again = self.layers - (depth if held is KVSource.ONE else 0)
        attention = 2 * self.query_heads * self.head_dim * (tokens + 1)
        return again * (self.projections + self.rest + attention)

    @property
    def projections(self) -> int:
        """Operations of one layer on one token up to its attention."""
        return 2 * self.hidden * self.head_dim * (self.query_heads + 2 * self.kv_heads)

    @property
    def rest(self) -> int:
        """Those behind it."""
        return 2 * self.hidden * (self.query_heads * self.head_dim + 3 * self.inner)


GEMMA_3_4B = ModelShape(34, 2560, 10240, 8, 4, 256)
LLAMA_3_1_8B = ModelShape(32, 4096, 14336, 32, 8, 128)
QWEN_3_0_6B = ModelShape(28, 1024, 3072, 16, 8, 128)
