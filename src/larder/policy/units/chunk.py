"""Chunks of consecutive tokens, kept or evicted together (ChunkKV).

Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM
Inference" (2025), arXiv:2502.00299, section 3. The paper adds up the weights in a chunk; here
they are averaged, as in NVIDIA's kvpress, whose 20 tokens are the default. For full chunks that is
the same, and fair to one that ends the text or lost entries before. Differences: budgets count
entries, so the last chunk that fits may stay in part, its earliest entries; every head has its own
chunks unless its scores are the layer's (`layer_mean`). The paper reuses the choice of one layer in
the next; `layers` says how many share it, 2 in most of the paper's tables. Layers that have come to
hold different positions, as under budgets that differ by layer, do not share.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.units.base import Unit, pool_spans


@dataclass(frozen=True)
class Chunk(Unit):
    """Mean score of a chunk. Chunks are cut by true position, from the first token on.

    Args:
        size: positions in a chunk.
        layers: consecutive layers that share the scores of the first of them.
    """

    size: int = 20
    layers: int = 1

    def __post_init__(self) -> None:
        require(self.size >= 1, "chunk.size", "at least 1 token", self.size)
        require(self.layers >= 1, "chunk.layers", "at least 1", self.layers)

    @property
    def layers_together(self) -> int:
        return self.layers

    def pool(self, scores: Packed, observation: Observation) -> Packed:
        return pool_spans(scores, observation.entries, self.size, len(scores))


Part = Chunk
