"""D2O's merging: numbers worked out by hand, and what it promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builders import a_plan
from larder.cache import merge_entries
from larder.core import LOG_COUNT, BadParameter, Entries, LayerScores, Variant
from larder.policy import FoldEma, MergeThreshold, Weights


def judged(lengths: tuple[int, ...]) -> LayerScores:
    zeros = torch.zeros(sum(lengths))
    return LayerScores(zeros, zeros.bool(), lengths)


def two_folded_into_one(tau: float = math.nan) -> Entries:
    """One kept entry (1, 0) and two rejected ones, (.9, .1) and (.8, .2)."""
    keys = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2]])
    positions = torch.arange(3, dtype=torch.int32)
    columns = {"mass": torch.tensor([6.0, 2.0, 3.0]), LOG_COUNT: torch.zeros(3)}
    return Entries(keys, 10 * keys, positions, (0,), (3,), columns, {"tau": torch.tensor([tau])})


@pytest.mark.parametrize(
    "part, expected",
    [
        (FoldEma(variant=Variant.PAPER), (0.9010, 0.0990)),
        (FoldEma(variant=Variant.CODE), (0.8902, 0.0978)),
        (FoldEma(variant=Variant.PAPER, weights=Weights.AVERAGE), (0.9000, 0.1000)),
    ],
)
def test_merged_keys_and_values_hand_values(part, expected) -> None:
    entries = two_folded_into_one()
    plan = replace(part, threshold=MergeThreshold.NONE).compensate(
        a_plan([[0]], (3,)), entries, judged((3,))
    )
    merged = merge_entries(plan, entries)
    assert merged.keys[0].tolist() == pytest.approx(expected, abs=5e-5)
    assert merged.values[0].tolist() == pytest.approx([10 * x for x in expected], abs=5e-4)
    sums = plan.folds.key_weights.sum()
    assert float(sums) == pytest.approx(1.0) or part.variant is Variant.CODE and sums < 1


def test_larder_variant_hand_values() -> None:
    # Per query that could see them 6 / 3, 2 / 2 and 3 / 1: 2, 1 and 3 of 6, three times its own.
    entries = two_folded_into_one()
    part = FoldEma(threshold=MergeThreshold.NONE)
    plan = part.compensate(a_plan([[0]], (3,)), entries, judged((3,)))
    merged = merge_entries(plan, entries)
    assert merged.keys[0].tolist() == [1.0, 0.0]
    value = [10 * (2 * 1.0 + 0.9 + 3 * 0.8) / 6, 10 * (0.1 + 3 * 0.2) / 6]
    assert merged.values[0].tolist() == pytest.approx(value)
    assert plan.columns[LOG_COUNT].tolist() == pytest.approx([math.log(3)])
    assert plan.folds.value_weights.sum() == pytest.approx(1.0)


def attended(keys: Tensor, values: Tensor, logs: Tensor, query: Tensor) -> Tensor:
    return (keys @ query + logs).softmax(0) @ values


def test_only_the_larder_merge_is_exact_for_a_repeated_query() -> None:
    """Mean keys take the attention of what they replace; keys that stay and count do not."""
    source = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 12, 8, generator=source)
    query, positions = torch.randn(8, generator=source), torch.arange(12, dtype=torch.int32)
    whole = attended(keys, values, torch.zeros(12), query)
    mass = (keys @ query).softmax(0) * (12 - positions)  # as much per query as this one gives
    columns = {"mass": mass, LOG_COUNT: torch.zeros(12)}
    entries = Entries(
        keys, values, positions, (0,), (12,), columns, {"tau": torch.tensor([math.nan])}
    )
    lost = dict[Variant, float]()
    for variant in Variant:
        part = FoldEma(threshold=MergeThreshold.NONE, variant=variant)
        plan = part.compensate(a_plan([[0, 4, 7, 11]], (12,)), entries, judged((12,)))
        merged, rows = merge_entries(plan, entries), [keys.clone(), values.clone()]
        rows[0][merged.targets], rows[1][merged.targets] = merged.keys, merged.values
        logs = plan.columns.get(LOG_COUNT, torch.zeros(4))
        out = attended(rows[0][plan.kept], rows[1][plan.kept], logs, query)
        lost[variant] = float((out - whole).norm() / whole.norm())
    kept = torch.tensor([0, 4, 7, 11])
    dropped = attended(keys[kept], values[kept], torch.zeros(4), query)
    assert lost[Variant.LARDER] < 1e-5
    assert min(lost[Variant.PAPER], lost[Variant.CODE]) > 0.2
    assert float((dropped - whole).norm() / whole.norm()) > 0.2


def test_threshold_follows_its_closed_form() -> None:
    likeness = [0.9 / math.hypot(0.9, 0.1), 0.8 / math.hypot(0.8, 0.2)]
    mean, tau = sum(likeness) / 2, math.nan
    for step in range(5):
        entries = two_folded_into_one(tau)
        plan = FoldEma(beta=0.7).compensate(a_plan([[0]], (3,)), entries, judged((3,)))
        tau = float(plan.scalars["tau"])
        assert tau == pytest.approx(mean, abs=1e-6), step
    entries = two_folded_into_one(0.5)
    for step in range(1, 6):
        plan = FoldEma(beta=0.7).compensate(a_plan([[0]], (3,)), entries, judged((3,)))
        entries = replace(entries, scalars=plan.scalars)
        closed = 0.3**step * 0.5 + (1 - 0.3**step) * mean
        assert float(plan.scalars["tau"]) == pytest.approx(closed, abs=1e-6)


@pytest.mark.parametrize("tau, sources", [(0.0, [1, 2, 0]), (math.nan, [1, 0]), (1.2, [])])
def test_entries_below_the_similarity_threshold_are_dropped(tau, sources) -> None:
    plan = FoldEma().compensate(a_plan([[0]], (3,)), two_folded_into_one(tau), judged((3,)))
    assert plan.folds.sources.tolist() == sources


def test_code_variant_merges_a_rank_in_all_heads_or_none() -> None:
    # Rank 0 is .99 and .6 alike, rank 1 .9 and .9: only the means of the ranks decide.
    keys = torch.tensor([[1.0, 0.0]] * 2).repeat_interleave(3, 0)
    for row, u in zip((1, 2, 4, 5), (0.99, 0.9, 0.6, 0.9), strict=True):
        keys[row] = torch.tensor([u, math.sqrt(1 - u * u)])
    positions = torch.arange(3, dtype=torch.int32).repeat(2)
    scalars = {"tau": torch.full((2,), torch.nan)}
    columns = {"mass": torch.ones(6), LOG_COUNT: torch.zeros(6)}
    entries = Entries(keys, keys, positions, (0, 3), (3, 3), columns, scalars)
    plan = a_plan([[0], [0]], (3, 3))
    by_head = FoldEma().compensate(plan, entries, judged((3, 3))).folds.sources.tolist()
    by_rank = FoldEma(variant=Variant.CODE).compensate(plan, entries, judged((3, 3)))
    assert sorted(set(by_head) - {0, 3}) == [1, 5]
    assert sorted(set(by_rank.folds.sources.tolist()) - {0, 3}) == [2, 5]


def test_all_entries_of_equal_similarity_merge() -> None:
    """Rounding puts the mean of equal numbers above or below them."""
    source = torch.Generator().manual_seed(0)
    for _ in range(20):
        row = torch.randn(4, generator=source)
        kept = torch.randn(4, generator=source)
        keys = torch.cat([kept[None], row.expand(50, 4)])
        positions = torch.arange(51, dtype=torch.int32)
        scalars = {"tau": torch.tensor([math.nan])}
        columns = {"mass": torch.ones(51), LOG_COUNT: torch.zeros(51)}
        entries = Entries(keys, keys, positions, (0,), (51,), columns, scalars)
        for _ in range(3):
            plan = FoldEma().compensate(a_plan([[0]], (51,)), entries, judged((51,)))
            assert len(plan.folds) == 51
            entries = replace(entries, scalars=plan.scalars)


@pytest.mark.parametrize("beta", [0.0, 1.5, math.nan])
def test_beta_out_of_range_is_refused(beta) -> None:
    with pytest.raises(BadParameter, match=r"fold_ema\.beta must be in \(0, 1\]"):
        FoldEma(beta=beta)
