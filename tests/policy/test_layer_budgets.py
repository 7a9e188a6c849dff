"""Budgets by numbers that were worked out by hand, and what holds while layers go by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import a_layer, a_view
from larder.core import LOG_COUNT, BadParameter, LayerScores, Phase
from larder.policy import (
    Ada,
    Budget,
    Cake,
    Dynamic,
    Pooled,
    PrefixKV,
    Pyramid,
    Threshold,
    Uniform,
    top_k_even,
)
from larder.session import FAMILIES
from references import cake as cake_loop


def judged(*heads: list[float], shielded: tuple[int, ...] = ()) -> LayerScores:
    """A layer with these scores; `shielded` are packed indices of what is protected."""
    scores = torch.tensor([score for head in heads for score in head])
    protected = torch.zeros(len(scores), dtype=torch.bool)
    protected[list(shielded)] = True
    return LayerScores(scores, protected, tuple(len(head) for head in heads))


def test_pyramid_decreases_in_equal_steps() -> None:
    def split(beta: float, tokens: int, layers: int, least: int, most: int) -> tuple[int, ...]:
        return Pyramid(beta=float(beta)).layer_tokens(tokens, layers, least, most, {})

    assert split(5, 100, 3, 0, 1000) == (180, 100, 20)
    assert split(5, 110, 3, 10, 1000) == (190, 110, 30)  # what is protected is beside it
    assert split(5, 100, 3, 0, 150) == (150, 100, 50)  # the bottom holds no more than the context
    assert split(1, 100, 4, 20, 1000) == (100,) * 4
    assert split(20, 100, 1, 0, 1000) == (100,)
    assert split(20, 100, 5, 0, 100) == (100,) * 5
    assert split(20, 10, 4, 10, 50) == (10,) * 4


def test_pyramid_layer_groups_share_a_step() -> None:
    """WindowKV's four groups of eight layers at 1,024: 1,463, 1,171, 878 and 585."""
    sizes = Pyramid(beta=1.75, layers=8).layer_tokens(1024, 32, 0, 10_000, {})
    assert sum(sizes) == 32 * 1024
    for group, expected in enumerate((1462.86, 1170.29, 877.71, 585.14)):
        assert all(abs(size - expected) < 1 for size in sizes[8 * group : 8 * group + 8])
    assert Pyramid(layers=4).layer_tokens(100, 4, 10, 1000, {}) == (100,) * 4


def test_ada_safeguard_moves_lengths_from_pooled_to_uniform() -> None:
    layer = judged([9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [3.0, 2.0, 1.0, 0.5, 0.4, 0.3])

    def lengths(safeguard: float) -> tuple[int, ...]:
        return Ada(safeguard=safeguard).choose({0: layer}, {0: 4})[0].lengths

    assert lengths(0.0) == Pooled().choose({0: layer}, {0: 4})[0].lengths == (6, 2)
    assert lengths(0.75) == (5, 3)
    assert lengths(1.0) == Uniform().choose({0: layer}, {0: 4})[0].lengths == (4, 4)


def test_threshold_keeps_scores_above_a_share_of_the_best() -> None:
    layer = judged([1.0, 0.5, 0.49, 0.1], [8.0, 5.0, 4.0, 3.9], shielded=(3,))

    def kept(share: float, tokens: int = 4) -> list[int]:
        return Threshold(share=share).choose({0: layer}, {0: tokens})[0].kept.tolist()

    assert kept(0.5) == [0, 1, 3, 4, 5, 6]
    assert kept(1.0) == [0, 3, 4]
    assert kept(0.5, 2) == [0, 3, 4, 5]
    assert kept(0.0, 3) == [0, 1, 3, 4, 5, 6]


def test_threshold_ignores_protected_scores() -> None:
    layer = judged([100.0, 1.0, 0.6, 0.4], shielded=(0,))
    assert Threshold(share=0.5).choose({0: layer}, {0: 4})[0].kept.tolist() == [0, 1, 2]


def test_threshold_of_negative_scores_is_relative_to_the_lowest() -> None:
    layer = judged([-1.0, -2.0, -4.0, -5.0])
    assert Threshold(share=0.5).choose({0: layer}, {0: 4})[0].kept.tolist() == [0, 1]


def lengths_of(budget: Budget, layers: list[LayerScores], tokens: int) -> list[tuple[int, ...]]:
    """Entries that each head of each layer keeps."""
    ready = dict(enumerate(layers))
    plans = budget.choose(ready, dict.fromkeys(ready, tokens))
    return [plans[index].lengths for index in ready]


def test_prefixkv_layers_keep_the_same_share_of_their_scores() -> None:
    flat = judged([1.0] * 10)  # each entry holds a tenth
    steep = judged([8.0, 1.0, 0.5, 0.5] + [0.0] * 6)
    assert lengths_of(PrefixKV(), [flat, steep], 5) == [(8,), (2,)]  # .8 reached: 8 of 10; 8 of 10
    assert lengths_of(PrefixKV(), [flat, steep], 1) == [(1,), (1,)]
    larger = judged([80.0, 10.0, 5.0, 5.0] + [0.0] * 6)  # only shares count, not sizes
    assert lengths_of(PrefixKV(), [flat, larger], 5) == [(8,), (2,)]


def test_prefixkv_coverage_ignores_protected_entries() -> None:
    sink = judged([1e6] + [1.0] * 9, shielded=(0,))
    assert lengths_of(PrefixKV(), [sink, judged([1.0] * 8 + [0.0] * 2)], 3) == [(4,), (2,)]


def test_prefixkv_shares_equal_scores_by_length() -> None:
    layers = [judged([0.0] * 6), judged([0.0] * 6), judged([0.0] * 12)]
    assert lengths_of(PrefixKV(), layers, 4) == [(3,), (3,), (6,)]


def test_dynamic_layers_get_their_count_among_the_global_best() -> None:
    rich, poor = judged([9.0, 8.0, 7.0, 6.0, 5.0, 4.0]), judged([3.0, 2.0, 1.0, 0.5, 0.4, 0.3])
    assert lengths_of(Dynamic(least=0.0), [rich, poor], 3) == [(6,), (0,)]
    assert lengths_of(Dynamic(least=0.5), [rich, poor], 4) == [(6,), (2,)]
    assert lengths_of(Dynamic(least=0.5), [rich, poor], 2) == [(3,), (1,)]
    assert lengths_of(Dynamic(least=0.0, most=1.4), [rich, poor], 3) == [(4,), (2,)]
    wanting = judged([3.0, 2.0, 1.0, 0.5, 0.4, 0.3], shielded=(4, 5))
    assert lengths_of(Dynamic(least=0.0), [rich, wanting], 2) == [(2,), (2,)]
    assert lengths_of(Dynamic(most=1.0), [judged([1.0]), rich], 2) == [(0,), (4,)]


def test_dynamic_layer_budget_covers_protected_entries() -> None:
    rich = judged([9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    layer = judged([0.1, 0.2], [0.3, 0.4, 0.5], shielded=(0, 1))
    assert lengths_of(Dynamic(least=0.0), [rich, layer], 2) == [(2,), (2, 2)]


def test_even_heads_give_the_remainder_to_the_best() -> None:
    layer = judged([5.0, 4.0, 3.0, 2.0], [9.0, 8.0, 1.0, 0.0], [7.0])
    assert top_k_even(layer, 5).lengths == (2, 2, 1)
    assert top_k_even(layer, 4).lengths == (1, 2, 1)
    assert top_k_even(layer, 6).lengths == (3, 2, 1)
    assert top_k_even(layer, 99).lengths == (4, 4, 1)


HEADS = [[*range(9)], [0, 2, 3, 5, 6, 7, 8]]


@pytest.mark.parametrize("window", [1, 3, 4, 32])
@pytest.mark.parametrize("tau", [(1.0, 1.0), (2.0, 0.5)])
def test_cake_preference_equals_its_reference(window, tau) -> None:
    part = Cake(window=window, tau1=tau[0], tau2=tau[1])
    observation = a_view(a_layer(), HEADS, queries=5, seed=4)
    source = torch.Generator().manual_seed(2)
    logs = torch.rand(len(observation.entries.keys), generator=source)
    for columns in ({}, {LOG_COUNT: logs}):
        view = replace(observation, entries=replace(observation.entries, columns=columns))
        expected = cake_loop.preference(part, view)
        (got,) = part.measure(view, torch.zeros(sum(view.entries.lengths)))
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-12)
        assert (got > 0) == (window > 1)


def test_layer_with_a_share_is_not_measured_during_decoding() -> None:
    observation = replace(a_view(a_layer(), HEADS), phase=Phase.DECODE)
    for share, numbers in ((torch.full((2,), torch.nan), 1), (torch.full((2,), 6.0), 0)):
        view = replace(observation, entries=replace(observation.entries, scalars={"share": share}))
        assert len(Cake().measure(view, torch.zeros(16))) == numbers


def cascade(layers: list[LayerScores], tokens: int) -> Iterator[dict[int, LayerScores]]:
    """Lengths of all layers after each layer was planned."""
    ready: dict[int, LayerScores] = {}
    quotas = dict.fromkeys(range(len(layers)), tokens)
    for index, layer in enumerate(layers):
        ready[index] = layer
        for cut, plan in Cake().choose(ready, quotas).items():
            ready[cut] = replace(ready[cut].after_plan(plan), scalars=plan.scalars)
        yield dict(ready)


@given(
    preferences=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=6),
    tokens=st.integers(1, 12),
    held=st.integers(1, 14),
    seed=st.integers(0, 9),
)
def test_cascade_replans_layers_after_later_ones(preferences, tokens, held, seed) -> None:
    source = torch.Generator().manual_seed(seed)
    draws = [torch.rand(2, held, generator=source).tolist() for _ in preferences]
    layers = [
        replace(judged(*heads, shielded=(0, held)), measure=(preference,))
        for heads, preference in zip(draws, preferences, strict=True)
    ]
    room = 2 * tokens * len(layers)
    for count, left in enumerate(cascade(layers, tokens), 1):
        assert sum(len(layer.scores) for layer in left.values()) == min(room, 2 * held * count)
        assert all(bool(layer.protected[0]) for layer in left.values())
    at_once = Cake().choose(dict(enumerate(layers)), dict.fromkeys(range(len(layers)), tokens))
    for index, plan in at_once.items():
        assert abs(sum(plan.lengths) - len(left[index].scores)) <= len(layers)
        if tokens < held:
            share = len(left[index].scores) / (2 * tokens)
            assert left[index].scalars["share"].tolist() == pytest.approx([share] * 2)


def test_cascade_shares_by_preference_including_later_layers() -> None:
    layers = [replace(judged([1.0] * 12), measure=(p,)) for p in (3.0, 1.0, 2.0)]
    left = [[len(layer.scores) for layer in ready.values()] for ready in cascade(layers, 4)]
    assert left == [[12], [9, 3], [6, 2, 4]]


def test_cascade_assumes_later_layers_have_the_fewest_heads() -> None:
    wide = replace(judged([1.0] * 9, [1.0] * 9), measure=(1.0,))
    narrow = replace(judged([1.0] * 9), measure=(1.0,))
    plans = Cake().choose({0: wide, 1: narrow}, {0: 3, 1: 3, 2: 3})
    assert sum(sum(plan.lengths) for plan in plans.values()) == 12


def test_dynamic_budgets_are_replanned_every_few_layers() -> None:
    """Four layers of 40 entries, 10 of which each may keep; the last have the best scores."""
    layers = {i: judged([float(i)] * 40) for i in range(4)}
    quotas = dict.fromkeys(layers, 10)
    part = Dynamic(most=3.0, least=0.1, every=2)
    held = dict[int, LayerScores]()
    left = []
    for index, layer in layers.items():
        held[index] = layer
        for cut, plan in part.choose(held, quotas).items():
            held[cut] = held[cut].after_plan(plan)
        left.append([len(scored.scores) for scored in held.values()])
    # Of two layers, the best 20 are all of the second, which has the most it may, 3 averages. Of
    # four, the best 40 are 10 of the third and 30 of the last; the others have the least.
    assert left == [[30], [10, 30], [10, 30, 30], [1, 1, 10, 28]]
    assert sum(left[-1]) == 40


def test_layer_keeps_its_share_during_decoding() -> None:
    share = {"share": torch.tensor([3.0, 3.0]) / 18}
    grown = replace(judged([3.0, 2.0, 1.0], [6.0, 5.0]), scalars=share)
    full = replace(judged([3.0, 2.0], [5.0]), scalars=share)
    plans = Cake().choose({0: grown, 1: full, 2: full}, {0: 9, 1: 9, 2: 9})
    assert {i: plan.lengths for i, plan in plans.items()} == {0: (1, 2), 2: (2, 1)}
    assert not any(plan.scalars for plan in plans.values())


@pytest.mark.parametrize("name", ["prefixkv", "dynamic", "cake"])
def test_layers_that_share_a_pool_are_due_together(name) -> None:
    budget = FAMILIES["budget"].load(name)()
    assert not budget.is_plan_due({0: 9, 1: 1}, {0: 5, 1: 5})
    assert budget.is_plan_due({0: 9, 1: 2}, {0: 5, 1: 5})


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Pyramid(beta=0.9), r"pyramid\.beta must be 1 or more, got 0\.9"),
        (lambda: Pyramid(beta=float("inf")), r"pyramid\.beta"),
        (lambda: Pyramid(beta=float("nan")), r"pyramid\.beta"),
        (lambda: Ada(safeguard=1.1), r"ada\.safeguard must be in \[0, 1\], got 1\.1"),
        (lambda: Ada(safeguard=-0.1), r"ada\.safeguard"),
        (lambda: Cake(window=0), r"cake\.window must be at least 1 token, got 0"),
        (lambda: Cake(tau1=0.0), r"cake\.tau1 must be at least 0\.05, got 0\.0"),
        (lambda: Cake(tau2=float("nan")), r"cake\.tau2"),
        (lambda: Dynamic(least=1.5), r"dynamic\.least must be in \[0, 1\], got 1\.5"),
        (lambda: Dynamic(most=0.5), r"dynamic\.most must be 1 or more, got 0\.5"),
        (lambda: Dynamic(most=float("inf")), r"dynamic\.most"),
        (lambda: Threshold(share=1.5), r"threshold\.share must be in \[0, 1\], got 1\.5"),
        (lambda: Threshold(share=float("nan")), r"threshold\.share"),
    ],
)
def test_parameters_out_of_range_are_refused(build, message) -> None:
    with pytest.raises(BadParameter, match=message):
        build()
