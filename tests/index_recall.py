"""Comparing what an index finds with the scores of a slow loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from larder.core import LayerSpec, RecallIndex, RecallPart
from slow_tiers import Tier


def built(
    part: RecallPart,
    layer: LayerSpec,
    growths: Sequence[Sequence[int]],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tier, RecallIndex]:
    """An index that grew with its tier."""
    tier, index = Tier(layer, seed, dtype), part.index(layer)
    for growth in growths:
        tier.grow(growth)
        index.add(tier.entries())
    return tier, index


def keys_of(tier: Tier) -> list[list[list[float]]]:
    return [head.float().tolist() for head in tier.keys]


def assert_best(found: Tensor, scores: Sequence[Sequence[float]], count: int) -> None:
    """Every set holds the best by the loop's scores, in order, but for what rounding swaps."""
    group = len(found) // len(scores)
    for row, pages in enumerate(found.tolist()):
        own = scores[row // group]
        real = [page for page in pages if page >= 0]
        assert len(set(real)) == len(real) == min(count, len(own))
        best = sorted(own, reverse=True)[:count]
        assert [own[page] for page in real] == pytest.approx(best, rel=1e-4, abs=1e-5)
