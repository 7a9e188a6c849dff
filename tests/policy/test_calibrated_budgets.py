"""Budgets by what was measured of a model, by numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from builders import a_layer, a_view
from larder import Policy
from larder.core import BadParameter, LayerScores, ModelError
from larder.policy import (
    Composite,
    EvictionError,
    GroupAndLayer,
    HeadKV,
    HeadTrial,
    Retrieval,
    RetrievalHeads,
    Squeeze,
    Trial,
    highest_group,
)


def judged(*heads: list[float], weights: tuple[float, ...] = (), shielded: int = 0) -> LayerScores:
    """A layer with these scores; the first entries of every head are protected."""
    scores = torch.tensor([score for head in heads for score in head])
    protected = torch.tensor([at < shielded for head in heads for at in range(len(head))])
    return LayerScores(scores, protected, tuple(len(head) for head in heads), weights=weights)


def lengths(budget: object, scored: LayerScores, tokens: int) -> tuple[int, ...]:
    return budget.choose({0: scored}, {0: tokens})[0].lengths


LONG = [float(20 - at) for at in range(20)]


def test_headkv_splits_a_base_and_a_shared_pool() -> None:
    calibration = {"reasoning": (0.0, 0.0, 0.1, 0.3)}
    half = HeadKV(beta=2.0)
    assert half.layer_tokens(100, 2, 0, 1000, calibration) == (50, 150)
    assert half.layer_tokens(110, 2, 10, 1000, calibration) == (
        60,
        160,
    )  # what is protected is beside it
    assert half.layer_tokens(100, 2, 0, 120, calibration) == (80, 120)
    assert half.layer_tokens(100, 2, 0, 1000, {"reasoning": (0.0,) * 4}) == (100, 100)
    assert HeadKV(beta=1.0).layer_tokens(100, 2, 0, 1000, calibration) == (0, 200)
    assert lengths(half, judged(LONG, LONG, weights=(0.1, 0.3)), 8) == (6, 10)
    assert lengths(half, judged(LONG, LONG, weights=(0.0, 0.3)), 8) == (4, 12)
    assert lengths(half, judged(LONG, LONG, weights=(0.1, 0.3), shielded=2), 8) == (7, 9)
    assert lengths(half, judged(LONG, LONG, weights=(0.0, 0.3), shielded=2), 8) == (5, 11)
    assert lengths(half, judged(LONG[:3], LONG, weights=(0.9, 0.1)), 8) == (3, 13)


def test_headkv_rounds_its_pool_down() -> None:
    # 96 beside 32 that are protected: a pool of 80 for each, and 16 of its own; 90 // 1.2 is 75.
    calibration = {"reasoning": (0.0, 0.0, 1.0, 1.0), "retrieval": (1.0, 1.0, 0.0, 0.0)}
    assert HeadKV().layer_tokens(128, 2, 32, 4000, calibration) == (32 + 16, 32 + 16 + 160)
    assert HeadKV().layer_tokens(122, 2, 32, 4000, calibration) == (32 + 15, 32 + 15 + 150)
    assert HeadKV().layer_tokens(123, 2, 32, 4000, calibration) == (32 + 16, 32 + 16 + 150)
    other = HeadKV(trial=HeadTrial.RETRIEVAL)
    assert other.layer_tokens(128, 2, 32, 4000, calibration) == (32 + 16 + 160, 32 + 16)
    assert (HeadKV().required_calibrations(), other.required_calibrations()) == (
        {"reasoning"},
        {"retrieval"},
    )
    assert Policy.parse("headkv").budget == HeadKV()


def test_headkv_base_is_the_same_in_layers_of_different_quotas() -> None:
    scored = judged(LONG, LONG, weights=(0.0, 0.3))
    plans = HeadKV(beta=4.0).choose({0: scored, 1: scored}, {0: 4, 1: 12})
    assert plans[0].lengths == (4, 4)  # 8 on average make a base of 6
    assert plans[1].lengths == (6, 18)


def test_retrieval_heads_get_the_remaining_budget() -> None:
    part = RetrievalHeads(share=0.25, trial=Trial.PASSKEYS)
    calibration = {"streaming_error": (0.1, 0.2, 0.9, 0.3)}
    assert part.head_weights(calibration) == (0.0, 0.0, 1.0, 0.0)
    assert part.layer_tokens(100, 2, 20, 1000, calibration) == (20, 180)
    assert part.layer_tokens(100, 2, 20, 200, calibration) == (90, 110)  # one head of two is whole
    scored = judged(LONG, LONG, weights=(0.0, 1.0), shielded=3)
    assert lengths(part, scored, 8) == (3, 13)
    assert lengths(part, scored, 15) == (10, 20)  # what it cannot fill goes back
    two = judged(LONG, LONG, LONG, weights=(1.0, 0.0, 1.0), shielded=3)
    assert lengths(part, two, 9) == (12, 3, 12)


def test_repeat_trial_selects_echo_and_induction_heads() -> None:
    echo = tuple(float(head == 7) for head in range(20))
    induction = tuple(float(head in (2, 3)) - head / 100 for head in range(20))
    part = RetrievalHeads()
    chosen = part.head_weights({"echo": echo, "induction": induction})
    assert [head for head, weight in enumerate(chosen) if weight] == [0, 2, 3, 7]  # 1 echo of 20
    assert part.required_calibrations() == {"echo", "induction"}
    assert RetrievalHeads(trial=Trial.PASSKEYS).required_calibrations() == {"streaming_error"}


def test_trained_gates_select_heads_by_quantile() -> None:
    part = RetrievalHeads(share=0.5, trial=Trial.GATES)
    assert part.required_calibrations() == {"duo_attention"}
    gates = {"duo_attention": (1.0, 0.1, 0.0, 0.3)}
    assert part.head_weights(gates) == (1.0, 0.0, 0.0, 1.0)
    assert part.layer_tokens(60, 2, 20, 100, gates) == (60, 60)


def test_squeezed_layers_give_tokens_to_the_others() -> None:
    calibration = {"squeeze": (0.2, 0.3, 0.6, 0.95, 0.96)}
    assert highest_group(calibration["squeeze"]) == 0.95
    assert Squeeze(p=0.4).layer_tokens(100, 5, 0, 1000, calibration) == (140, 140, 140, 40, 40)
    assert Squeeze(p=0.4).layer_tokens(100, 5, 70, 1000, calibration) == (120, 120, 120, 70, 70)
    assert Squeeze().layer_tokens(100, 3, 0, 1000, {"squeeze": (0.5,) * 3}) == (100,) * 3
    assert Squeeze(p=0.5).layer_tokens(100, 2, 0, 1000, {"squeeze": (0.5, 0.4)}) == (50, 150)


def test_recent_share_does_not_raise_the_budget_of_a_reduced_layer() -> None:
    calibration = {"squeeze": (0.2, 0.3, 0.6, 0.95, 0.96)}
    planner = Policy.parse("squeeze_attention").with_sizes(100, None).planner
    quotas = planner.quotas(100, 1000, (0, 1, 2, 3, 4), calibration)
    assert tuple(quotas.values()) == (144, 143, 143, 35, 35)  # p = .35; 50 and 50 before
    scores = torch.zeros(1000)
    scores[:100] = 1.0
    recent = partial(planner.protect.mask, torch.arange(1000), 1000)
    squeezed = LayerScores(scores, recent(100), (1000,), protection=recent)
    kept = planner.budget.choose({3: squeezed}, {3: 35})[3].kept
    assert kept.tolist() == [*range(18), *range(983, 1000)]  # 17 of 35 are recent


def test_layers_share_by_eviction_error_above_a_minimum() -> None:
    calibration = {"eviction_error": (0.1, 0.3, 0.4)}
    part = EvictionError(least=20, most=3.0)
    assert part.layer_tokens(100, 3, 0, 1000, calibration) == (50, 110, 140)
    assert part.layer_tokens(100, 3, 60, 1000, calibration) == (75, 105, 120)
    capped = EvictionError(least=20, most=1.2)
    assert capped.layer_tokens(100, 3, 0, 1000, calibration) == (60, 120, 120)


def test_composite_rows_compete_over_all_layers() -> None:
    first = judged([9.0, 1.0, 0.0], [5.0, 4.0, 0.0])  # rows 7, 2.5, 0
    second = judged([3.0, 2.9, 2.8], [3.1, 3.0, 2.0])  # rows 3.05, 2.95, 2.4
    plans = Composite().choose({0: first, 1: second}, {0: 2, 1: 2})
    assert [plans[index].lengths for index in (0, 1)] == [(2, 2), (2, 2)]
    plans = Composite().choose({0: first, 1: second}, {0: 1, 1: 2})
    assert [plans[index].lengths for index in (0, 1)] == [(1, 1), (2, 2)]
    assert plans[1].kept.tolist() == [0, 1, 3, 4]
    equal = judged([1.0] * 20)  # of equal rows those of the earlier layer stay
    plans = Composite().choose({0: equal, 1: equal}, {0: 12, 1: 12})
    assert [plans[index].lengths for index in (0, 1)] == [(20,), (4,)]


def test_composite_rows_are_non_increasing() -> None:
    uneven = judged([0.1], [0.1], [5.0, 4.9])  # rows 1.73 and 4.9, which counts as 1.73
    plans = Composite().choose({0: uneven, 1: judged([3.0, 2.0])}, {0: 1, 1: 1})
    assert [plans[index].lengths for index in (0, 1)] == [(0, 0, 0), (2,)]


def test_layer_score_is_that_of_the_best_retrieval_heads() -> None:
    layer = a_layer(2, 2)
    observation = a_view(layer, [[0, 3], [3, 9]])
    statistics = [torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[6.0, 5.0], [8.0, 7.0]])]
    observation = replace(observation, calibration={"retrieval": (0.1, 0.9, 0.8, 0.2)})
    alone = Retrieval(heads=1).join(statistics, observation.entries, observation)
    assert [head.tolist() for head in alone] == [[3.0, 5.0], [5.0, 6.0]]  # 9: the own group
    both = Retrieval(heads=2).join(statistics, observation.entries, observation)
    assert [head.tolist() for head in both] == [[3.0, 5.5], [5.5, 5.0]]
    with pytest.raises(ModelError, match="4 query heads, but the calibration 'retrieval' has 2"):
        few = replace(observation, calibration={"retrieval": (0.1, 0.2)})
        Retrieval().join(statistics, few.entries, few)


def test_layer_score_is_added_to_head_scores() -> None:
    layer = a_layer(2, 1)
    observation = a_view(layer, [[0, 3], [3, 9]])
    statistics = [torch.tensor([[1.0, 2.0]]), torch.tensor([[6.0, 5.0]])]
    joined = GroupAndLayer().join(statistics, observation.entries, observation)
    assert [head.tolist() for head in joined] == [[2.0, 6.0], [10.0, 10.0]]


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: HeadKV(beta=0.9), r"headkv\.beta must be 1 or more, got 0\.9"),
        (lambda: HeadKV(beta=float("nan")), r"headkv\.beta"),
        (lambda: RetrievalHeads(share=0.0), r"retrieval_heads\.share must be a fraction"),
        (lambda: RetrievalHeads(share=1.1), r"retrieval_heads\.share"),
        (lambda: Squeeze(p=0.0), r"squeeze\.p must be a fraction in \(0, 1\], got 0\.0"),
        (lambda: Squeeze(p=float("nan")), r"squeeze\.p"),
        (lambda: EvictionError(least=-1), r"eviction_error\.least must be 0 or more, got -1"),
        (lambda: EvictionError(most=0.5), r"eviction_error\.most must be 1 or more, got 0\.5"),
        (lambda: Retrieval(heads=0), r"retrieval\.heads must be at least 1, got 0"),
    ],
)
def test_parameters_out_of_range_are_refused(build, message) -> None:
    with pytest.raises(BadParameter, match=message):
        build()
