"""D2O's layer budgets: numbers worked out by hand, and what they promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from builders import a_layer, a_view
from larder.core import BadParameter, LayerScores, Phase, Variant
from larder.policy import ColumnMass, Drop, InverseVariance, Planner, Protect, Rule
from references.inverse_variance import tokens as split_by_loop


def layers_of(heads: list[int], held: int) -> dict[int, LayerScores]:
    source = torch.Generator().manual_seed(3)
    return {
        index: LayerScores(
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
def test_layers_share_one_pool_and_equal_their_reference(
    spreads, heads, same, tokens, held, rule, variant
) -> None:
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


def test_layer_shares_hand_values() -> None:
    ready = layers_of([1, 1, 1], 1000)
    spreads = (math.exp(1.0), math.exp(2.0), math.exp(3.0))
    ready = {i: replace(s, measure=(spreads[i],)) for i, s in ready.items()}

    def shares(part: InverseVariance) -> list[int]:
        plans = part.choose(ready, dict.fromkeys(ready, 100))
        return [plans[i].lengths[0] for i in range(3)]

    # Standard deviations of e^.5, e^1, e^1.5: 1, .6065, .3679 of 1.9744.
    assert shares(InverseVariance()) == [152, 92, 56]
    assert shares(InverseVariance(temperature=0.5)) == [200, 73, 27]
    assert shares(InverseVariance(rule=Rule.UNIFORM)) == [100, 100, 100]
    # 1, e^-1, e^-2
    assert shares(InverseVariance(rule=Rule.RECIPROCAL)) == [200, 73, 27]
    # 1, e^-2, e^-4
    assert shares(InverseVariance(rule=Rule.EXPONENTIAL_DECAY)) == [250, 34, 16]
    # exp(-e^2 + e) = .0094: the paper's softmax leaves one layer standing
    assert shares(InverseVariance(variant=Variant.PAPER)) == [268, 16, 16]
    assert shares(InverseVariance(temperature=1e6)) == [100, 100, 100]


def test_code_variant_keeps_end_layers_whole_within_the_budget() -> None:
    ready = layers_of([1] * 5, 100)
    ready = {i: replace(s, measure=(1.0,)) for i, s in ready.items()}
    part = InverseVariance(variant=Variant.CODE)
    plans = part.choose(ready, dict.fromkeys(ready, 80))
    assert [plans[i].lengths[0] for i in range(5)] == [100, 100, 50, 50, 100]
    plans = part.choose(ready, dict.fromkeys(ready, 40))
    assert [plans[i].lengths[0] for i in range(5)] == [100, 52, 16, 16, 16]


def test_measure_is_the_variance_of_received_attention() -> None:
    observation = a_view(a_layer(2, 1), [range(5), range(3)], 2)
    heads = torch.split(observation.entries.column("mass"), [5, 3])
    variances = [float(((h - h.mean()) ** 2).sum() / (len(h) - 1)) for h in heads]
    observation = replace(
        observation, entries=replace(observation.entries, scalars={"share": torch.full((2,), 7.0)})
    )
    measured = InverseVariance(variant=Variant.PAPER).measure(observation, torch.zeros(8))
    assert measured == pytest.approx((sum(variances) / 2,))
    later = replace(observation, phase=Phase.DECODE)
    assert InverseVariance().measure(later, torch.zeros(8)) == ()


def test_larder_variant_ignores_sinks_and_age() -> None:
    """A strong sink and many queries made a layer look sparse, whatever lies between."""
    observation, source = a_view(a_layer(1, 1), [range(50)], 2), torch.Generator().manual_seed(2)
    rows = observation.entries.rows(0)
    rates = torch.rand(50, generator=source) / 50

    def measured(sink: float, queries: Tensor) -> float:
        mass = torch.zeros(len(observation.entries.keys))
        mass[rows] = rates * queries
        mass[rows][0] = sink
        columns = {**observation.entries.columns, "mass": mass}
        scalars = {"share": torch.full((1,), math.nan)}
        view = replace(
            observation, entries=replace(observation.entries, columns=columns, scalars=scalars)
        )
        [got] = InverseVariance().measure(view, torch.zeros(50))
        return got

    age = 50 - torch.arange(50)
    assert measured(0.1, age) == measured(25.0, age)
    assert measured(0.1, age) == pytest.approx(float(rates[4:].var()), rel=1e-4)


@pytest.mark.parametrize("kv_heads, group", [(1, 3), (2, 2), (1, 1)])
def test_code_variant_scales_variances_over_query_heads(kv_heads, group) -> None:
    """Two kv heads alone always come to .5, and one to 0, whatever their attention is."""
    observation = a_view(a_layer(kv_heads, group), [range(9)] * kv_heads, 4)
    queries, positions = observation.queries, observation.query_positions
    variances = []
    for head in range(kv_heads * group):
        keys = observation.entries.head_keys(head // group)
        mass = torch.zeros(9)
        for query, position in zip(queries[head], positions.tolist(), strict=True):
            logits = keys[: position + 1] @ query * observation.layer.scaling
            mass[: position + 1] += logits.softmax(0)
        variances.append(float(mass.double().var()))
    low, high = min(variances), max(variances)
    scaled = [(variance - low) / (high - low + 1e-6) for variance in variances]
    [got] = InverseVariance(variant=Variant.CODE).measure(observation, torch.zeros(9 * kv_heads))
    assert got == pytest.approx(sum(scaled) / len(scaled), abs=1e-4)


def test_recent_ratio_applies_to_each_layers_entries() -> None:
    """Recent tokens by the average budget left a layer of 25 entries 4 sinks and 21 recent."""
    source, tokens, length = torch.Generator().manual_seed(1), 85, 300
    planner = Planner(Protect(4, 0.25), ColumnMass(), InverseVariance(), Drop())
    views, ready = {}, {}
    for index in range(3):
        observation = a_view(a_layer(2, 1, index=index), [range(length)] * 2, 5)
        mass = torch.rand(len(observation.entries.keys), generator=source) * 10.0**index
        columns = {**observation.entries.columns, "mass": mass}
        scalars = {"share": torch.full((2,), math.nan)}
        views[index] = replace(observation.entries, columns=columns, scalars=scalars)
        observation = replace(observation, entries=views[index])
        ready[index] = planner.with_protection(observation, planner.score(observation), tokens)
    quotas = dict.fromkeys(range(3), tokens)
    plans = planner.plan(ready, quotas, views.__getitem__)
    own = [plan.lengths[0] for plan in plans.values()]
    assert min(own) < 26 and max(own) > 150 and sum(own) == 3 * tokens
    for index, plan in plans.items():
        mass, (first, _) = views[index].column("mass"), plan.lengths
        for head, kept in enumerate((plan.kept[:first], plan.kept[first:] - length)):
            recent = first // 4
            heavy = mass[length * head :][4 : length - recent].topk(first - recent - 4).indices
            expected = {*range(4), *(heavy + 4).tolist(), *range(length - recent, length)}
            assert set(kept.tolist()) == expected


def test_layer_keeps_its_share_during_decoding() -> None:
    ready = {
        i: replace(s, scalars={"share": torch.tensor([(10 + i) / 20])}, phase=Phase.DECODE)
        for i, s in layers_of([1, 1], 30).items()
    }
    plans = InverseVariance().choose({0: ready[0]}, {0: 20, 1: 20})
    assert {i: plan.lengths for i, plan in plans.items()} == {0: (10,)}
    assert InverseVariance().choose(ready, {0: 20, 1: 20})[1].lengths == (11,)
    assert InverseVariance().choose(ready, {0: 40, 1: 40})[1].lengths == (22,)


def test_plan_is_due_when_layers_exceed_their_total_quota() -> None:
    assert not InverseVariance().is_plan_due({0: 30, 1: 10}, {0: 20, 1: 20})
    assert InverseVariance().is_plan_due({0: 31, 1: 10}, {0: 20, 1: 20})


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperature_out_of_range_is_refused(temperature) -> None:
    with pytest.raises(BadParameter, match=r"inverse_variance\.temperature must be above 0"):
        InverseVariance(temperature=temperature)
