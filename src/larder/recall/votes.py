"""Vote index (TokenSelect): entries by the votes of all heads, reused while queries are similar.

Wu et al., "TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via
Dynamic Token-Level KV Cache Selection" (2024), arXiv:2411.02886: every query
head's softmax over the keys of its kv head is its vote; their sum selects one set of tokens for all
heads. The selection is reused while the cosine between the queries of all heads, taken as one
vector, and those of the last selection is at least a threshold. A chunk of the prompt is read with
one selection, too: its mean query of each head votes, and the whole chunk attends to the selection,
to the first and the latest tokens, and to itself.

Differences: the softmax has the model's own scaling, and query head h votes by kv head h // R (the
released kernel has neither). A chunk is a block of the schedule, and a question is one. Votes are
for positions, so that heads that offload different tokens take, of the same ranking, those that
they have. A new selection is also made when another number of entries is requested, or when a
head's entries no longer fill it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Entries
from larder.core.recall import PrefillRecall, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import top_rows
from larder.recall._index_base import EntryIndex, EntryRecall, mask_missing, softmax_weights


@dataclass(frozen=True)
class Votes(EntryRecall):
    """Entries by the attention of all query heads together.

    Args:
        threshold: minimum cosine with the queries of the last selection for reusing it; 1 and more
            selects at every step.
        prefill: entries that blocks of a text and questions attend to: `exact`, everything, or
            `recalled`, as many as a decode step.
    """

    threshold: float = 0.9
    prefill: PrefillRecall = PrefillRecall.EXACT

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.threshold >= -1, "votes.threshold", "at least -1", self.threshold)

    def index(self, layer: LayerSpec) -> VotesIndex:
        return VotesIndex(layer, self.threshold)


class VotesIndex(EntryIndex):
    """Index with the last selection, its queries, and its requested size."""

    is_stateless = False  # it stores the last queries
    tables = {"asked": None, "chosen": None}

    def __init__(self, layer: LayerSpec, threshold: float) -> None:
        super().__init__(layer)
        self._threshold = threshold
        self._asked = torch.zeros(0)
        self._count = 0
        self._chosen = torch.zeros(layer.kv_heads, 0, dtype=torch.int64)

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        asked = queries.float().flatten()
        if not self._is_selection_valid(asked, count):
            self._asked, self._count = asked.clone(), count
            self._chosen = self.exact(queries, entries, count).pages
        return RecallResult(self._chosen)

    def _is_selection_valid(self, queries: Float[Tensor, " Q"], count: int) -> bool:
        """True if the last selection can be reused."""
        if self._threshold >= 1 or count != self._count or not self._filled():
            return False
        norms = self._asked.norm() * queries.norm()
        return bool(self._asked @ queries >= self._threshold * norms)

    def _filled(self) -> bool:
        """True if every head has as many entries in the selection as it could have now."""
        wanted = torch.tensor(self.paged.indexed).clamp(max=self._count)
        return bool(((self._chosen >= 0).sum(1) == wanted).all())

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        weights, indexed = softmax_weights(self.logits(queries, entries)), self.paged.indexed
        groups = weights.view(len(indexed), self.layer.group, weights.shape[1]).sum(1)  # [K, M]
        return RecallResult(
            top_rows(mask_missing(_sum_by_position(groups, entries, indexed), indexed), count)
        )

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"count": torch.tensor(self._count)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._count = int(state["count"])


def _sum_by_position(
    votes: Float[Tensor, "K M"], entries: Entries, indexed: tuple[int, ...]
) -> Float[Tensor, "K M"]:
    """Votes of all heads for the position of each entry."""
    positions = _padded_positions(entries, indexed, votes.shape[1])
    if bool((positions == positions[:1]).all()):
        return votes.sum(0).expand_as(votes).clone()
    total = votes.new_zeros(int(positions.max()) + 1)
    for each, own_positions in zip(votes, positions, strict=True):
        total.index_add_(0, own_positions, each)
    return total[positions]


def _padded_positions(
    entries: Entries, indexed: tuple[int, ...], longest: int
) -> Int64[Tensor, "K M"]:
    """Positions of the entries of each head; 0 after its last, where votes are 0."""
    positions = torch.zeros(len(indexed), longest, dtype=torch.int64)
    for head, length in enumerate(indexed):
        positions[head, :length] = entries.head_positions(head)[:length]
    return positions


Part = Votes
