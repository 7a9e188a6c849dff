"""Contract of every budget, and the loop that each must equal."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from builders import head_numbers
from larder import Policy
from larder.core import BadParameter, LayerScores, Plan, public_name
from larder.policy import Drawn, Uniform

SIGMA = st.floats(-1, 1.0001, allow_nan=False)


SCORE = st.sampled_from([-2.0, 0.0, 0.5, 1.0, 7.0])
# Entries of one head, with many equal scores and some protected; heads; layers with their quotas.
HEAD = st.lists(st.tuples(SCORE, st.sampled_from([False, False, False, True])), max_size=7)
HEADS = st.lists(HEAD, min_size=1, max_size=3)
CASES = st.dictionaries(
    st.integers(0, 5), st.tuples(HEADS, st.integers(1, 8)), min_size=1, max_size=3
)


MEASURES = {index: (float((7 * index) % 5 + 1),) for index in range(6)}  # of each layer
WAITING = (
    "global",
    "fixed_threshold",
    "inverse_variance",
    "prefixkv",
    "composite",
    "lazy_layers",
    "recovery",
)
# Used up to the last entry: over all layers, or in each.
IN_ALL = ("global", "prefixkv", "dynamic", "cake", "lazy_layers", "recovery")
BY_LAYER = ("pooled", "sensitivity", "ada", "headkv", "retrieval_heads")


def ready_of(case: dict[int, Any]) -> tuple[dict[int, LayerScores], dict[int, int]]:
    """Judged layers and their quotas."""
    ready = {}
    for index, (heads, _) in case.items():
        entries = [entry for head in heads for entry in head]
        scores = torch.tensor([score for score, _ in entries])
        protected = torch.tensor([shield for _, shield in entries], dtype=torch.bool)
        lengths = tuple(len(head) for head in heads)
        weights = head_numbers(len(lengths))
        ready[index] = LayerScores(scores, protected, lengths, MEASURES[index], weights=weights)
    return ready, {index: quota for index, (_, quota) in case.items()}


def chosen(budget: Any, ready: dict[int, LayerScores], quotas: dict[int, int]) -> dict[int, Plan]:
    """Plans for all; where layers are cut again, those that lose nothing may have none."""
    plans = budget.choose(ready, quotas)
    if budget.replans:
        wholes = {i: torch.ones_like(s.protected) for i, s in ready.items()}
        plans = {i: Plan.from_mask(w, ready[i].lengths) for i, w in wholes.items()} | plans
    return plans


def as_lists(scored: LayerScores) -> list[list[tuple[float, bool]]]:
    pairs = list(zip(scored.scores.tolist(), scored.protected.tolist(), strict=True))
    out, start = [], 0
    for length in scored.lengths:
        out.append(pairs[start : start + length])
        start += length
    return out


def kept_per_head(plan: Any, lengths: tuple[int, ...]) -> list[list[int]]:
    out, start = [], 0
    for part, length in zip(plan.kept.split(plan.lengths), lengths, strict=True):
        out.append((part - start).tolist())
        start += length
    return out


@given(case=CASES)
def test_budget_equals_its_reference(budget, loop_of, case) -> None:
    ready, quotas = ready_of(case)
    before = {i: (s.scores.clone(), s.protected.clone()) for i, s in ready.items()}
    plans = chosen(budget, ready, quotas)
    for index, scored in ready.items():  # nothing written is an input
        assert torch.equal(scored.scores, before[index][0])
        assert torch.equal(scored.protected, before[index][1])
    judged = {i: as_lists(s) for i, s in ready.items()}
    expected = loop_of(budget).choose(budget, judged, quotas, MEASURES)
    assert {i: kept_per_head(p, ready[i].lengths) for i, p in plans.items()} == expected
    assert_a_bound_that_is_used_up(budget, ready, quotas, plans)
    most = {i: max(sum(p for _, p in head) for head in heads) for i, heads in judged.items()}
    if all(most[i] <= quotas[i] for i in ready):
        for index, plan in plans.items():
            kept = set(plan.kept.tolist())
            assert set(ready[index].protected.nonzero().flatten().tolist()) <= kept


def assert_a_bound_that_is_used_up(
    budget: Any, ready: dict[int, LayerScores], quotas: dict[int, int], plans: dict[int, Plan]
) -> None:
    assert plans.keys() == ready.keys()
    for index, plan in plans.items():
        assert plan.kept.dtype is torch.int64
        assert torch.equal(plan.kept, plan.kept.sort().values)
        assert all(
            kept <= held for kept, held in zip(plan.lengths, ready[index].lengths, strict=True)
        )
    kept = sum(sum(plan.lengths) for plan in plans.values())
    held = sum(sum(scored.lengths) for scored in ready.values())
    allowed = sum(quotas[i] * len(ready[i].lengths) for i in ready)
    if public_name(type(budget)) == "unlimited":
        assert kept == held
    elif public_name(type(budget)) in IN_ALL:
        assert kept == min(held, allowed)
    else:
        assert kept <= min(held, allowed)
    if public_name(type(budget)) in BY_LAYER:
        for index, plan in plans.items():
            pool = quotas[index] * len(ready[index].lengths)
            assert sum(plan.lengths) == min(sum(ready[index].lengths), pool)


def test_head_order_does_not_matter(budget) -> None:
    if public_name(type(budget)) == "drawn":
        pytest.skip("it draws for each head in turn, so that order counts")
    source = torch.Generator().manual_seed(1)
    heads = [torch.randn(length, generator=source) for length in (5, 9, 3)]
    order = [2, 0, 1]

    def survivors(parts: list[torch.Tensor]) -> list[list[int]]:
        lengths = tuple(len(part) for part in parts)
        scored = LayerScores(
            torch.cat(parts), torch.zeros(sum(lengths), dtype=torch.bool), lengths, (1.0,)
        )
        return kept_per_head(budget.choose({0: scored}, {0: 4})[0], lengths)

    straight = survivors(heads)
    assert survivors([heads[h] for h in order]) == [straight[h] for h in order]


def test_budget_waits_for_the_layers_it_needs(budget) -> None:
    scored = LayerScores(torch.tensor([1.0, 2.0]), torch.zeros(2, dtype=torch.bool), (2,), (1.0,))
    plans = budget.choose({0: scored}, {0: 1, 1: 1})
    assert list(plans) == ([] if public_name(type(budget)) in WAITING else [0])


def measured(sigma: list[float]) -> dict[str, tuple[float, ...]]:
    """Every measurement that a budget looks up; two heads a layer where it is one of heads."""
    sizes = [abs(value) for value in sigma]
    return {
        "sensitivity": tuple(sigma),
        "squeeze": tuple(sigma),
        "eviction_error": tuple(sizes),
        "retrieval": tuple(number for size in sizes for number in (size, size / 2)),
        "reasoning": tuple(number for size in sizes for number in (size / 3, size)),
        "streaming_error": tuple(number for size in sizes for number in (size / 2, 0.5)),
        "duo_attention": tuple(number for size in sizes for number in (size, 0.4)),
        "reconstruction": tuple(number for size in sizes for number in (0.3, size)),
        "echo": tuple(number for size in sizes for number in (0.5 - size, size)),
        "utility": tuple(
            number
            for size in sizes
            for head in (size, 0.5)
            for number in (head * (1 - (1 - at / 16) ** 2 + at % 3 / 40) for at in range(1, 17))
        ),
        "induction": tuple(number for size in sizes for number in (0.25, size)),
    }


@given(
    sigma=st.lists(SIGMA, min_size=1, max_size=8),
    tokens=st.integers(1, 300),
    least=st.integers(0, 40),
    spare=st.integers(-40, 900),
    alpha=st.floats(0, 8),
)
def test_layer_quotas_sum_exactly_and_equal_their_reference(
    budget, loop_of, sigma, tokens, least, spare, alpha
) -> None:
    most = tokens + spare
    assume(least <= tokens and most >= 1)
    if "alpha" in {f.name for f in fields(budget)}:
        budget = replace(budget, alpha=alpha)
    layers = len(sigma)
    calibration = measured(sigma)
    quotas = budget.layer_tokens(tokens, layers, least, most, calibration)
    assert sum(quotas) == tokens * layers
    assert min(quotas) >= least
    expected = loop_of(budget).layer_tokens(budget, tokens, layers, least, most, calibration)
    for got, deserved in zip(quotas, expected, strict=True):
        assert abs(got - deserved) <= 1 + 1e-6 * tokens


def test_sensitive_layers_get_more_tokens() -> None:
    from larder.core import Variant
    from larder.policy import Sensitivity

    calibration = {"sensitivity": (1.0, 0.9, 0.7)}  # weights 0, .01, .09
    larder = Sensitivity().layer_tokens(101, 3, 0, 1000, calibration)
    assert larder == (25, 28, 250)  # a quarter for the first, the others 278 at 1 : 9, rounded
    assert Sensitivity(alpha=1.0).layer_tokens(100, 3, 0, 1000, calibration) == (25, 69, 206)
    assert Sensitivity().layer_tokens(100, 3, 0, 120, calibration) == (60, 120, 120)
    paper = Sensitivity(variant=Variant.PAPER).layer_tokens(100, 3, 0, 1000, calibration)
    assert paper == (0, 30, 270)
    code = Sensitivity(alpha=1.0, variant=Variant.CODE).layer_tokens(100, 3, 0, 1000, calibration)
    assert code == (25, 69, 206)  # stretched to 0, 1/3, 1
    assert Sensitivity(alpha=0.0).layer_tokens(100, 3, 0, 1000, calibration) == (100, 100, 100)


# What the bundled model was measured to have, rounded.
BUNDLED = {"sensitivity": (1.0, 0.9992, 0.9994, 0.9987, 0.9987, 0.9946)}


def test_larger_alpha_changes_the_split_only_below_a_floor_of_a_quarter() -> None:
    """On a floor of a quarter alpha 4 and alpha 8 are the same split."""
    from larder.policy import Sensitivity

    def split(**parameters: float) -> tuple[int, ...]:
        return Sensitivity(**parameters).layer_tokens(256, 6, 0, 2000, BUNDLED)

    assert split(alpha=4.0) == split(alpha=8.0) == (64, 64, 64, 64, 64, 1216)
    assert split(alpha=4.0, floor=0.0)[5] < split(alpha=8.0, floor=0.0)[5] == 1536
    assert split(floor=0.5) == (128, 128, 128, 128, 128, 896)
    assert split(floor=1.0) == (256,) * 6
    assert min(split(floor=0.001)) == 1
    with pytest.raises(BadParameter, match=r"sensitivity\.floor"):
        split(floor=1.5)
    preset = Policy.parse("epicache")
    assert preset.protect.least(256).tokens == 0  # neither the paper nor its code protects any
    sharp, sharper = (replace(preset.budget, alpha=alpha) for alpha in (4.0, 8.0))
    splits = [one.layer_tokens(256, 6, 0, 2000, BUNDLED) for one in (sharp, sharper)]
    assert splits[0] != splits[1]


def test_sampling_follows_the_softmax_of_the_scores() -> None:
    """One entry is safe and one of three others is drawn; chi-square with two degrees."""
    scores, rounds = torch.tensor([9.0, 0.0, 1.0, 2.0]), 2000
    scored = LayerScores(scores, torch.zeros(4, dtype=torch.bool), (4,))
    counts = torch.zeros(4)
    for seed in range(rounds):
        kept = Drawn(share=0.5, seed=seed).choose({3: scored}, {3: 2})[3].kept
        counts[kept] += 1
    assert counts[0] == rounds and counts.sum() == 2 * rounds
    expected = scores[1:].softmax(0) * rounds
    assert float(((counts[1:] - expected) ** 2 / expected).sum()) < 13.8  # 1 in 1,000 by chance


def test_nacl_hand_values_of_32_000_tokens() -> None:
    """256 sinks, 64 latest and the best 3,840 stay; 2,240 of the others are drawn: 6,400."""
    scores = torch.linspace(1, 0, 32_000)
    protected = torch.zeros(32_000, dtype=torch.bool)
    protected[:256] = protected[-64:] = True
    scored = LayerScores(scores, protected, (32_000,))
    kept = Drawn().choose({0: scored}, {0: 6_400})[0].kept
    assert len(kept) == 6_400
    first = 256 + 3_840  # of falling scores, the best behind the sinks
    assert torch.equal(kept[:first], torch.arange(first))
    assert torch.equal(kept[-64:], torch.arange(32_000 - 64, 32_000))
    drawn = kept[first:-64]
    assert len(drawn) == 2_240 and int(drawn.max()) > 20_000


def test_zero_share_equals_uniform_and_a_full_share_differs() -> None:
    lengths = (5, 9, 3)
    scores = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(2))
    scored = LayerScores(scores, torch.zeros(len(scores), dtype=torch.bool), lengths)
    plans = [each.choose({0: scored}, {0: 4})[0] for each in (Drawn(share=0.0), Uniform())]
    assert torch.equal(plans[0].kept, plans[1].kept) and plans[0].lengths == plans[1].lengths
    assert not torch.equal(Drawn(share=1.0).choose({0: scored}, {0: 4})[0].kept, plans[1].kept)


@pytest.mark.parametrize(
    "size", [{"tokens": 0}, {"kept": 0.0}, {"kept": 1.5}, {"tokens": 4, "kept": 0.5}]
)
def test_sizes_out_of_range_are_refused(budget, size) -> None:
    if not {f.name for f in fields(budget) if f.init} & {"tokens"}:
        pytest.skip("takes no size")
    with pytest.raises(BadParameter, match=public_name(type(budget))):
        replace(budget, **size)


@pytest.mark.parametrize("alpha", [-1.0, float("inf"), float("nan")])
def test_alphas_out_of_range_are_refused(alpha) -> None:
    from larder.policy import Sensitivity

    with pytest.raises(BadParameter, match=r"sensitivity\.alpha"):
        Sensitivity(alpha=alpha)


def test_budget_is_frozen_and_cited(budget) -> None:
    for field in fields(budget):
        with pytest.raises(FrozenInstanceError):
            setattr(budget, field.name, None)
    citation = inspect.getmodule(type(budget)).__doc__
    assert "arXiv:" in citation or "o paper" in citation
