"""Chunks of tokens, of which those of one high score keep only their best tokens (ChunkKV).

Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM
Inference" (2025), arXiv:2502.00299, with the gate of NVIDIA/kvpress 0.5.5 (EntropyGatedChunkKV). A
chunk that one token makes important would spend the budget on its neighbors. So the entropy of the
scores within each chunk, over the logarithm of its length, is compared with the median of all: of
a chunk with less, and a mean score of the median or more, the `spiky` best tokens stay, of the
others all, chunk by chunk. What such chunks left comes after all chunks, by its own scores.

Scores become ranks, which say that order to any budget. Differences: every head has its own chunks
unless its scores are the layer's (`layer_mean`, as kvpress does); entries with infinite scores,
such as a window that votes, stay beside the chunks, where kvpress gives them the highest score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.arguments import require_at_least
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.units.base import Unit, group_labels

EPSILON = 1e-8  # as in kvpress


@dataclass(frozen=True)
class EntropyChunk(Unit):
    """Rank of an entry among those of its head, by chunks. Chunks are cut by true position.

    Args:
        size: positions in a chunk.
        spiky: entries that stay of an important chunk with little entropy; `size` or more
            for all.
        layers: consecutive layers that share the scores of the first of them.
    """

    size: int = 10
    spiky: int = 4
    layers: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, "entropy_chunk", size=self.size, spiky=self.spiky, layers=self.layers)

    @property
    def layers_together(self) -> int:
        return self.layers

    def pool(self, scores: Packed, observation: Observation) -> Packed:
        lengths = list(observation.entries.lengths)
        spans = observation.entries.packed_positions().long() // self.size
        heads = zip(torch.split(scores, lengths), torch.split(spans, lengths), strict=True)
        return torch.cat([self._ranks(own, labels) for own, labels in heads])

    def _ranks(self, scores: Float[Tensor, " S"], spans: Int64[Tensor, " S"]) -> Tensor:
        """Ranks of one head, the highest first; infinite scores do not change."""
        counted = scores.isfinite()
        held, out = scores[counted], scores.clone()
        if len(held):
            order = self._order(held, group_labels(spans[counted], (len(held),)))
            ranks = torch.empty_like(held)
            ranks[order] = torch.arange(len(held), 0, -1, dtype=held.dtype, device=held.device)
            out[counted] = ranks
        return out

    def _order(
        self, scores: Float[Tensor, " S"], chunks: Int64[Tensor, " S"]
    ) -> Int64[Tensor, " S"]:
        """Entries in the order in which they stay.

        Args:
            chunks: number of each entry's chunk, from 0 on.
        """
        sizes = chunks.bincount()
        means = torch.zeros(len(sizes), device=scores.device).index_add_(0, chunks, scores) / sizes
        entropy = _entropies(scores, chunks, sizes)
        spiky = (means >= means.median()) & (entropy < entropy.median())
        turn = torch.empty_like(sizes)
        turn[means.argsort(descending=True, stable=True)] = torch.arange(len(sizes)).to(turn)
        best = scores.argsort(descending=True, stable=True)
        by_chunk = best[chunks[best].argsort(stable=True)]  # the best of each chunk first
        index = torch.empty_like(chunks)
        starts = sizes.cumsum(0) - sizes
        index[by_chunk] = torch.arange(len(chunks)).to(chunks) - starts[chunks[by_chunk]]
        is_left = spiky[chunks] & (index >= self.spiky)
        turns = turn[chunks].masked_fill(is_left, len(sizes))
        return best[turns[best].argsort(stable=True)]


def _entropies(
    scores: Float[Tensor, " S"], chunks: Int64[Tensor, " S"], sizes: Int64[Tensor, " C"]
) -> Float[Tensor, " C"]:
    """Entropy of each chunk's scores, over that of equal ones, in [0, 1]; 0 for a single entry."""
    least = torch.zeros(len(sizes), device=scores.device)
    least = least.scatter_reduce(0, chunks, scores, "amin")  # at most 0
    shares = scores - least[chunks]
    total = torch.zeros_like(least).index_add_(0, chunks, shares)
    shares = shares / (total[chunks] + EPSILON)
    terms = shares * (shares + EPSILON).log()
    entropy = -torch.zeros_like(least).index_add_(0, chunks, terms)
    most = sizes.clamp(min=2).double().log().to(entropy)
    return (entropy / most).clamp(0.0, 1.0).masked_fill(sizes == 1, 0.0)


Part = EntropyChunk
