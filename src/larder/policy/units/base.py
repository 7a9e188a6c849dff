"""Base class of units: groups of entries that are kept or evicted together."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Int64
from torch import Tensor

from larder.core.observation import Entries, Observation
from larder.core.part import PolicyPart
from larder.core.types import Packed


class Unit(PolicyPart, ABC):
    """Grouping that gives all entries of a group one score. A frozen dataclass."""

    @property
    def layers_together(self) -> int:
        """Number of consecutive managed layers that share the scores of the first; 1 shares none.

        Only layers whose heads hold the same positions share.
        """
        return 1

    @property
    def needs_whole_text(self) -> bool:
        """True if it judges by the end of a text, so that all of it must have been read."""
        return False

    def with_budget(self, tokens: int) -> Unit:
        """Copy with open parameters filled in for a budget of `tokens` entries per kv head."""
        del tokens
        return self

    @abstractmethod
    def pool(self, scores: Packed, observation: Observation) -> Packed:
        """Scores of the same shape, equal within a unit; infinite scores do not change."""


def pool_spans(scores: Packed, entries: Entries, size: int, best: int) -> Packed:
    """Mean of the `best` highest scores of each span, for all its entries.

    Infinite scores do not change and do not count.

    Args:
        size: positions in a span; the first span of every head starts at position 0.
    """
    spans = entries.packed_positions().long() // size
    return pool_groups(scores, spans, entries.lengths, best)


def pool_groups(
    scores: Packed, spans: Int64[Tensor, " T"], lengths: tuple[int, ...], best: int
) -> Packed:
    """Mean of the `best` highest scores of each group of a head, for all its entries.

    Args:
        spans: group number of each entry, 0 or more; a group is contiguous in its head.
    """
    if not len(scores):
        return scores
    labels = group_labels(spans, lengths)
    firsts = torch.diff(labels, prepend=labels.new_full((1,), -1)).nonzero().flatten()
    slots = torch.arange(len(scores), device=spans.device) - firsts[labels]
    finite = scores.isfinite()
    table = scores.new_full((len(firsts), int(slots.max()) + 1), -torch.inf)
    table[labels, slots] = scores.masked_fill(~finite, -torch.inf)
    top = table.sort(1, descending=True).values[:, :best]
    counted = top.isfinite()
    means = top.masked_fill(~counted, 0.0).sum(1) / counted.sum(1).clamp(min=1)
    return means[labels].where(finite, scores)


def group_labels(spans: Int64[Tensor, " T"], lengths: tuple[int, ...]) -> Int64[Tensor, " T"]:
    """Number of the group of each entry, counted over all heads, as `pool_groups` forms them."""
    counts = torch.tensor(lengths, device=spans.device)
    heads = torch.arange(len(counts), device=spans.device).repeat_interleave(counts)
    is_first = spans.new_ones(len(spans), dtype=torch.bool)
    is_first[1:] = (spans[1:] != spans[:-1]) | (heads[1:] != heads[:-1])
    return is_first.cumsum(0) - 1
