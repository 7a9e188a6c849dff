"""D2O by numbers that were worked out by hand, and what its layer budgets promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import a_layer, a_plan, a_view
from larder.cache.folding import folded
from larder.core.errors import BadParameter
from larder.core.observation import Entries, Scored, Stage
from larder.core.types import Variant
from larder.policy.budgets.inverse_variance import InverseVariance, Rule
from larder.policy.compensation.fold_ema import FoldEma, Threshold, Weights
from references.inverse_variance import tokens as split_by_loop


def two_folded_into_one(tau: float = math.nan) -> Entries:
    """One kept entry (1, 0) and two rejected ones, (.9, .1) and (.8, .2)."""
    keys = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2]])
    places = torch.arange(3, dtype=torch.int32)
    return Entries(keys, 10 * keys, places, (0,), (3,), {}, {"tau": torch.tensor([tau])})


def judged(lengths: tuple[int, ...]) -> Scored:
    zeros = torch.zeros(sum(lengths))
    return Scored(zeros, zeros.bool(), lengths)


@pytest.mark.parametrize(
    "part, expected",
    [
        (FoldEma(), (0.9010, 0.0990)),
        (FoldEma(variant=Variant.PAPER), (0.9010, 0.0990)),
        (FoldEma(variant=Variant.CODE), (0.8902, 0.0978)),
        (FoldEma(weights=Weights.AVERAGE), (0.9000, 0.1000)),
    ],
)
def test_merged_keys_and_values_by_hand(part, expected) -> None:
    entries = two_folded_into_one()
    plan = replace(part, threshold=Threshold.NONE).settle(
        a_plan([[0]], (3,)), entries, judged((3,))
    )
    merged = folded(plan, entries)
    assert merged.keys[0].tolist() == pytest.approx(expected, abs=5e-5)
    assert merged.values[0].tolist() == pytest.approx([10 * x for x in expected], abs=5e-4)
    sums = plan.folds.key_weights.sum()
    assert float(sums) == pytest.approx(1.0) or part.variant is Variant.CODE and sums < 1


def test_the_threshold_starts_at_the_mean_and_follows_by_the_closed_form() -> None:
    likeness = [0.9 / math.hypot(0.9, 0.1), 0.8 / math.hypot(0.8, 0.2)]
    mean, tau = sum(likeness) / 2, math.nan
    for step in range(5):
        entries = two_folded_into_one(tau)
        plan = FoldEma(beta=0.7).settle(a_plan([[0]], (3,)), entries, judged((3,)))
        tau = float(plan.scalars["tau"])
        assert tau == pytest.approx(mean, abs=1e-6), step
    entries = two_folded_into_one(0.5)
    for step in range(1, 6):
        plan = FoldEma(beta=0.7).settle(a_plan([[0]], (3,)), entries, judged((3,)))
        entries = replace(entries, scalars=plan.scalars)
        closed = 0.3**step * 0.5 + (1 - 0.3**step) * mean
        assert float(plan.scalars["tau"]) == pytest.approx(closed, abs=1e-6)


@pytest.mark.parametrize("tau, sources", [(0.0, [1, 2, 0]), (math.nan, [1, 0]), (1.2, [])])
def test_what_is_not_like_enough_is_dropped(tau, sources) -> None:
    plan = FoldEma().settle(a_plan([[0]], (3,)), two_folded_into_one(tau), judged((3,)))
    assert plan.folds.sources.tolist() == sources


def test_the_code_folds_a_rank_in_all_heads_or_in_none() -> None:
    # Rank 0 is .99 and .6 alike, rank 1 .9 and .9: only the means of the ranks decide.
    keys = torch.tensor([[1.0, 0.0]] * 2).repeat_interleave(3, 0)
    for row, u in zip((1, 2, 4, 5), (0.99, 0.9, 0.6, 0.9), strict=True):
        keys[row] = torch.tensor([u, math.sqrt(1 - u * u)])
    places = torch.arange(3, dtype=torch.int32).repeat(2)
    scalars = {"tau": torch.full((2,), torch.nan)}
    entries = Entries(keys, keys, places, (0, 3), (3, 3), {}, scalars)
    plan = a_plan([[0], [0]], (3, 3))
    by_head = FoldEma().settle(plan, entries, judged((3, 3))).folds.sources.tolist()
    by_rank = FoldEma(variant=Variant.CODE).settle(plan, entries, judged((3, 3)))
    assert sorted(set(by_head) - {0, 3}) == [1, 5]
    assert sorted(set(by_rank.folds.sources.tolist()) - {0, 3}) == [2, 5]


def layers_of(heads: list[int], held: int) -> dict[int, Scored]:
    source = torch.Generator().manual_seed(3)
    return {
        index: Scored(
            torch.rand(k * held, generator=source),
            torch.zeros(k * held, dtype=torch.bool),
            (held,) * k,
        )
        for index, k in enumerate(heads)
    }


@given(
    spreads=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=7),
    heads=st.lists(st.integers(1, 3), min_size=7, max_size=7),
    same=st.booleans(),
    tokens=st.integers(1, 60),
    held=st.integers(1, 120),
    rule=st.sampled_from(list(Rule)),
    variant=st.sampled_from(list(Variant)),
)
def test_layers_share_one_pool_exactly(spreads, heads, same, tokens, held, rule, variant) -> None:
    part = InverseVariance(rule=rule, variant=variant)
    heads = [heads[0]] * len(spreads) if same else heads[: len(spreads)]
    ready = layers_of(heads, held)
    ready = {i: replace(s, measure=(spreads[i],)) for i, s in ready.items()}
    plans = part.choose(ready, dict.fromkeys(ready, tokens))
    if tokens >= held:
        assert all(plan.lengths == ready[i].lengths for i, plan in plans.items())
        assert not any(plan.scalars for plan in plans.values())
        return
    kept = sum(sum(plan.lengths) for plan in plans.values())
    allowed = sum(tokens * k for k in heads)
    assert kept <= allowed and kept > allowed - sum(heads)
    assert kept == allowed or len(set(heads)) > 1
    lists = [[[(0.0, False)] * held for _ in range(k)] for k in heads]
    expected = split_by_loop(part, lists, [tokens] * len(heads), spreads)
    got = [plans[i].lengths[0] for i in range(len(heads))]
    assert all(abs(a - b) <= 1 for a, b in zip(got, expected, strict=True))
    shares = [float(plans[i].scalars["share"][0]) for i in plans]
    assert shares == pytest.approx([kept / tokens for kept in got])


def test_shares_by_hand() -> None:
    ready = layers_of([1, 1, 1], 1000)
    spreads = (math.exp(1.0), math.exp(2.0), math.exp(3.0))
    ready = {i: replace(s, measure=(spreads[i],)) for i, s in ready.items()}

    def shares(part: InverseVariance) -> list[int]:
        plans = part.choose(ready, dict.fromkeys(ready, 100))
        return [plans[i].lengths[0] for i in range(3)]

    # z-scores of 1, 2, 3 are -1.2247, 0, 1.2247: weights 3.4034, 1, 0.2938, floors of 16.
    assert shares(InverseVariance()) == [217, 64, 19]
    assert shares(InverseVariance(rule=Rule.UNIFORM)) == [100, 100, 100]
    # 1, e^-1, e^-2
    assert shares(InverseVariance(rule=Rule.RECIPROCAL)) == [200, 73, 27]
    # 1, e^-2, e^-4
    assert shares(InverseVariance(rule=Rule.EXPONENTIAL_DECAY)) == [250, 34, 16]
    # exp(-e^2 + e) = .0094: the paper's softmax leaves one layer standing
    assert shares(InverseVariance(variant=Variant.PAPER)) == [268, 16, 16]
    assert shares(InverseVariance(temperature=1e6)) == [100, 100, 100]


def test_the_code_keeps_the_ends_whole_as_far_as_there_is_room() -> None:
    ready = layers_of([1] * 5, 100)
    ready = {i: replace(s, measure=(1.0,)) for i, s in ready.items()}
    part = InverseVariance(variant=Variant.CODE)
    plans = part.choose(ready, dict.fromkeys(ready, 80))
    assert [plans[i].lengths[0] for i in range(5)] == [100, 100, 50, 50, 100]
    plans = part.choose(ready, dict.fromkeys(ready, 40))
    assert [plans[i].lengths[0] for i in range(5)] == [100, 52, 16, 16, 16]


def test_a_measure_is_the_variance_of_what_entries_received() -> None:
    seen = a_view(a_layer(2, 1), [range(5), range(3)], 2)
    heads = torch.split(seen.entries.column("mass"), [5, 3])
    variances = [float(((h - h.mean()) ** 2).sum() / (len(h) - 1)) for h in heads]
    seen = replace(seen, entries=replace(seen.entries, scalars={"share": torch.full((2,), 7.0)}))
    measured = InverseVariance().measure(seen, torch.zeros(8))
    assert measured == pytest.approx((sum(variances) / 2,))
    (low, high) = sorted(variances)
    code = InverseVariance(variant=Variant.CODE).measure(seen, torch.zeros(8))
    assert code == pytest.approx(((high - low) / (high - low + 1e-6) / 2,))
    later = replace(seen, stage=Stage.GENERATING)
    assert InverseVariance().measure(later, torch.zeros(8)) == ()


def test_while_generating_a_layer_keeps_its_share() -> None:
    ready = {
        i: replace(s, scalars={"share": torch.tensor([(10 + i) / 20])}, stage=Stage.GENERATING)
        for i, s in layers_of([1, 1], 30).items()
    }
    plans = InverseVariance().choose({0: ready[0]}, {0: 20, 1: 20})
    assert {i: plan.lengths for i, plan in plans.items()} == {0: (10,)}
    assert InverseVariance().choose(ready, {0: 20, 1: 20})[1].lengths == (11,)
    assert InverseVariance().choose(ready, {0: 40, 1: 40})[1].lengths == (22,)


def test_layers_that_share_are_due_when_all_together_are_over() -> None:
    assert not InverseVariance().due({0: 30, 1: 10}, {0: 20, 1: 20})
    assert InverseVariance().due({0: 31, 1: 10}, {0: 20, 1: 20})


def test_equal_likenesses_share_one_fate() -> None:
    """Rounding puts the mean of equal numbers above or below them."""
    source = torch.Generator().manual_seed(0)
    for _ in range(20):
        row = torch.randn(4, generator=source)
        kept = torch.randn(4, generator=source)
        keys = torch.cat([kept[None], row.expand(50, 4)])
        places = torch.arange(51, dtype=torch.int32)
        scalars = {"tau": torch.tensor([math.nan])}
        entries = Entries(keys, keys, places, (0,), (51,), {}, scalars)
        for _ in range(3):
            plan = FoldEma().settle(a_plan([[0]], (51,)), entries, judged((51,)))
            assert len(plan.folds) == 51
            entries = replace(entries, scalars=plan.scalars)


@pytest.mark.parametrize("beta", [0.0, 1.5, math.nan])
def test_a_beta_out_of_range_is_refused(beta) -> None:
    with pytest.raises(BadParameter, match=r"fold_ema\.beta must be in \(0, 1\]"):
        FoldEma(beta=beta)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_out_of_range_is_refused(temperature) -> None:
    with pytest.raises(BadParameter, match=r"inverse_variance\.temperature must be above 0"):
        InverseVariance(temperature=temperature)
