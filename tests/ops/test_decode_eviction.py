"""Evictions of a decode step: the entries they keep, and layers they skip."""

from __future__ import annotations

import pytest
import torch

from larder.core import StepColumn, StepRule, StepScore, StepScoring
from larder.ops import EvictionStorage, EvictionTable, c_library, evict_step, layer_evictions

pytestmark = pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")

BY_MASS = StepRule(StepScoring(StepScore.MASS), None, {StepColumn.MASS: "mass"})


def layer(count: int | None, logit: float = 0.0) -> EvictionStorage:
    """Two heads of 6 entries, in regions of 10 rows."""
    torch.manual_seed(0)
    logits = torch.randn(2, 20)
    logits[0, 3] += logit
    return EvictionStorage(
        keys=torch.randn(20, 8),
        values=torch.randn(20, 8),
        positions=torch.arange(20, dtype=torch.int32) % 10,
        starts=torch.tensor([0, 10]),
        lengths=torch.tensor([6, 6]),
        edges=(0, 10, 20),
        columns=torch.rand(1, 20),
        updated={StepColumn.MASS: 0},
        joined=None,
        log_counts=None,
        thresholds=None,
        logits=logits,
        count=count,
        first=1,
        stop=5,
    )


@pytest.mark.parametrize("storage", [layer(5, torch.nan), layer(1)], ids=["nan", "too many"])
def test_skipped_layer_is_unchanged(storage: EvictionStorage) -> None:
    tensors = [each for each in storage if isinstance(each, torch.Tensor)]
    before = [each.clone() for each in tensors]
    fits = layer(5)
    assert evict_step([storage, fits], 16, BY_MASS) == [None, 5]
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(tensors, before, strict=True)
    )
    assert fits.lengths.tolist() == [5, 5]


def test_attention_mass_is_added_without_an_eviction() -> None:
    own = layer(None)
    before = own.columns.clone()
    assert evict_step([own], 16, BY_MASS) == [4]
    assert own.lengths.tolist() == [6, 6]
    weights = own.logits[:, 10:16].softmax(1).sum(0)
    assert torch.allclose(own.columns[0, 10:16] - before[0, 10:16], weights, atol=1e-5)


def test_lowest_unprotected_entries_are_evicted_in_order() -> None:
    own = layer(4)
    mass = own.columns[0].clone()
    for start in (0, 10):
        rows = slice(start, start + 6)
        mass[rows] += own.logits[:, rows].softmax(1).sum(0)
    expected = [
        sorted(sorted(range(1, 5), key=lambda s: float(mass[start + s]))[2:] + [0, 5])
        for start in (0, 10)
    ]
    keys = own.keys.clone()
    evict_step([own], 16, BY_MASS)
    for start, kept in zip((0, 10), expected, strict=True):
        assert own.positions[start : start + 4].tolist() == kept
        assert torch.equal(own.keys[start : start + 4], keys[[start + s for s in kept]])


def test_rows_of_one_sequence_are_kept_with_its_table() -> None:
    table, other = (EvictionTable([layer(5)], BY_MASS, [1]) for _ in range(2))
    rows = layer_evictions([table], 3, 16)
    assert rows is not None and rows is layer_evictions([table], 3, 16)
    assert rows.layers.tolist() == [[0], [table.rows.ctypes.data], [0]]
    fewer = layer_evictions([table], 2, 16)
    assert fewer is not None and len(fewer.layers) == 2
    both = layer_evictions([table, other], 3, 16)
    assert both is not None and both.layers.shape == (3, 2)
