"""Re-selection index (LoopServe): entries that the latest queries attend to, every few steps.

Li et al., "LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn
Dialogues" (2025), arXiv:2507.13681: while an answer is generated, what it attends to moves. Every
16 tokens entries are chosen again, from the full cache, by the attention of the last 16 queries;
an entry that one choice left out returns with another, which eviction would not allow. A text or
question that is read in between ends a choice: the first step after it chooses by its queries.

With a coverage below 1 a text or question of some length is read along vertical and slash lines of
attention, chosen for each query head and input (`larder.ops.line_attention`). Layers with a softcap
or latents, and scratch passes, read exactly. Differences: attention is summed over queries and over
the query heads of a kv head [inferred], whose entries lie together; an input is what is read at a
time, such as a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Entries
from larder.core.recall import FetchMode, RecallResult
from larder.core.spec import LayerSpec
from larder.ops.search import top_rows
from larder.recall._index_base import (
    EntryIndex,
    EntryRecall,
    mask_missing,
    softmax_weights,
    sum_group_weights,
)


@dataclass(frozen=True)
class Rewatch(EntryRecall):
    """Entries by the attention of the latest queries, chosen again every few steps.

    Args:
        every: steps that one choice stands for, and queries that it is made by.
        coverage: share of each query head's attention, in (0, 1], that the lines cover along which
            a text is read; 1 reads it exactly.
    """

    every: int = 16
    coverage: float = 1.0

    follows: ClassVar[bool] = True
    observed: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, "rewatch.every", "at least 1 step", self.every)
        require(0 < self.coverage <= 1, "rewatch.coverage", "in (0, 1]", self.coverage)
        if self.coverage < 1 and self.union is not None:
            raise BadParameter(
                f"rewatch.union must be open with coverage={self.coverage}, got {self.union}: a "
                "question is read along lines. Leave one of the two out."
            )
        if self.fetch is not FetchMode.IN_TURN:
            raise BadParameter(
                f"rewatch.fetch must be in_turn, got {self.fetch.value}: it chooses by the queries "
                "of steps, not by predicted ones."
            )

    def index(self, layer: LayerSpec) -> RewatchIndex:
        return RewatchIndex(layer, self.every)


class RewatchIndex(EntryIndex):
    """Index with the latest queries, the choice that stands, and for how many steps it does."""

    is_stateless = False  # it stores the last queries
    tables: ClassVar = {"latest": None, "chosen": None, "course": None}

    def __init__(self, layer: LayerSpec, every: int) -> None:
        super().__init__(layer)
        self._every = every
        self._latest = torch.zeros(layer.query_heads, 0, layer.head_dim)
        self._chosen = torch.zeros(layer.kv_heads, 0, dtype=torch.int64)
        self._course = torch.zeros(2, dtype=torch.int64)  # steps it stands for, entries asked for

    def observe_step(
        self,
        queries: Float[Tensor, "H D"],
        stays: Entries,
        before: Float[Tensor, "H Q D"] | None = None,
    ) -> None:
        if before is not None and not _ends_alike(self._latest, before):
            self._latest, self._course = before.float(), torch.zeros(2, dtype=torch.int64)
        latest = torch.cat([self._latest, queries.float()[:, None]], 1)
        self._latest = latest[:, -self._every :].contiguous()

    def find(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        left, asked = self._course.tolist()
        if left < 1 or asked != count or self._has_room(count):
            self._chosen, left = self.exact(queries, entries, count).pages, self._every
        self._course = torch.tensor([left - 1, count])
        return RecallResult(self._chosen.clone())

    def _has_room(self, count: int) -> bool:
        """True if a head has entries that the choice has room for."""
        wanted = torch.tensor(self.paged.indexed).clamp(max=count)
        return bool(((self._chosen >= 0).sum(1) < wanted).any())

    def exact(self, queries: Float[Tensor, "H D"], entries: Entries, count: int) -> RecallResult:
        rows = self._latest if self._latest.shape[1] else queries.float()[:, None]
        indexed, total = self.paged.indexed, torch.zeros(len(queries), max(self.paged.indexed))
        for row in rows.unbind(1):
            logits = mask_missing(self.logits(row.contiguous(), entries), indexed)
            total += softmax_weights(logits)
        return RecallResult(top_rows(sum_group_weights(total, indexed), count))


def _ends_alike(one: Float[Tensor, "H N D"], other: Float[Tensor, "H Q D"]) -> bool:
    """True if the last queries of both are equal: no text was read between."""
    return one.shape[1] > 0 and torch.equal(one[:, -1], other[:, -1].float())


Part = Rewatch
