"""Scores that look at values and at neighbors, as the loops say."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from builders import a_layer, a_view
from larder import Policy
from larder.core import BadParameter, Observation
from larder.policy import Caote, Chunk, Criticality, EntropyChunk, Task, Window
from larder.session import FAMILIES
from references.attention_loop import heads_of, positions_of

PAPER = re.compile(r"\(20\d\d\),\s+arXiv:\d{4}\.\d{5}|[Nn]o paper")
INF = math.inf
SCORE = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, INF, -INF]),
    st.floats(0, 4, width=32, allow_subnormal=False),
    st.floats(-2, 2, width=32, allow_subnormal=False),
)
# Positions and scores of the entries of one head; heads.
HEADS = st.lists(st.dictionaries(st.integers(0, 14), SCORE, max_size=9), min_size=1, max_size=3)
CASE = {
    "plain": [{0: 0.1, 1: 0.4, 2: 0.2, 5: 0.3}, {3: 0.7, 4: 0.05}, {0: 0.0, 6: 0.5, 9: 0.25}],
    "negative": [{0: -0.5, 1: 0.4, 2: -1.0, 8: 0.0}, {3: 0.7, 4: -0.05, 5: 0.1}, {0: 1.0, 1: -2.0}],
    "infinite": [{0: INF, 1: 0.4, 2: 0.2, 5: -INF}, {3: -INF, 4: INF}, {0: 0.5, 1: 0.0, 9: INF}],
    "nothing_weighs": [{0: 0.0, 1: 0.0, 2: 0.0}, {0: 0.0}, {4: 0.0, 5: 0.0}],
    "one_weighs_all": [{0: 0.0, 1: 2.0, 2: 0.0}, {7: 0.5}, {4: INF, 5: 1.0}],
    "an_empty_head": [{}, {0: 0.5, 3: 0.25, 4: 1.0}, {1: 0.1}],
}


def scored_view(heads: list[dict[int, float]]) -> tuple[Tensor, Observation]:
    """Packed scores, and a layer that holds their entries."""
    held = [sorted(head) for head in heads]
    scores = [
        head[index] for head, positions in zip(heads, held, strict=True) for index in positions
    ]
    return torch.tensor(scores), a_view(a_layer(len(heads), 2), held, 2)


def values_of(observation: Observation) -> list[list[list[float]]]:
    return [observation.entries.head_values(head).tolist() for head in heads_of(observation)]


def weighed_by_loop(
    rule: Any, loop: Any, scores: Tensor, observation: Observation
) -> list[list[float]]:
    """Scores weighed by the loop of a rule, which is given the columns that the rule reads."""
    names = rule.required_providers().intersection(observation.entries.columns)
    columns = {name: split(observation.entries.column(name), observation) for name in names}
    return loop.weighed(rule, split(scores, observation), values_of(observation), **columns)


def positions_by_head(observation: Observation) -> list[list[int]]:
    return [positions_of(observation.entries, head) for head in heads_of(observation)]


def split(scores: Tensor, observation: Observation) -> list[list[float]]:
    return [part.tolist() for part in scores.split(observation.entries.lengths)]


def assert_equal(got: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(head) for head in got] == [len(head) for head in expected]
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", CASE)
def test_value_rule_equals_its_reference(values, loop_of, case) -> None:
    scores, seen = scored_view(CASE[case])
    got = split(values.weigh(scores, seen), seen)
    assert_equal(got, weighed_by_loop(values, loop_of(values), scores, seen))


@given(heads=HEADS)
def test_value_rules_equal_their_references_on_any_scores(values, loop_of, heads) -> None:
    scores, seen = scored_view(heads)
    got = split(values.weigh(scores, seen), seen)
    assert_equal(got, weighed_by_loop(values, loop_of(values), scores, seen))


@pytest.mark.parametrize("case", CASE)
def test_unit_equals_its_reference(unit, loop_of, case) -> None:
    scores, seen = scored_view(CASE[case])
    got = split(unit.pool(scores, seen), seen)
    assert_equal(got, loop_of(unit).pooled(unit, split(scores, seen), positions_by_head(seen)))


@given(heads=HEADS, size=st.integers(1, 7), best=st.sampled_from([0.01, 0.29, 0.5, 0.75, 1.0]))
def test_units_of_any_size_equal_their_references(unit, loop_of, heads, size, best) -> None:
    chosen = {"size": size, "best": best, "layers": 1}
    unit = replace(unit, **{f.name: chosen[f.name] for f in fields(unit) if f.name in chosen})
    scores, seen = scored_view(heads)
    got = split(unit.pool(scores, seen), seen)
    assert_equal(got, loop_of(unit).pooled(unit, split(scores, seen), positions_by_head(seen)))


RULES = [
    pytest.param(getattr(FAMILIES[slot].load(name)(), method), id=name)
    for slot, method in (("values", "weigh"), ("unit", "pool"))
    for name in FAMILIES[slot].names()
]


@pytest.mark.parametrize("case", CASE)
@pytest.mark.parametrize("rule", RULES)
def test_infinite_scores_are_kept_and_finite_ones_stay_finite(rule, case) -> None:
    scores, seen = scored_view(CASE[case])
    got = rule(scores, seen)
    assert got.dtype is torch.float32
    assert got.shape == scores.shape
    assert torch.equal(got.isposinf(), scores.isposinf())
    assert torch.equal(got.isneginf(), scores.isneginf())
    assert not got.isnan().any()


@pytest.mark.parametrize("rule", RULES)
def test_infinite_scores_do_not_affect_others(rule) -> None:
    scores, seen = scored_view(CASE["infinite"])
    flipped = torch.where(scores.isfinite(), scores, -scores)
    finite = scores.isfinite()
    assert torch.equal(rule(scores, seen)[finite], rule(flipped, seen)[finite])


@pytest.mark.parametrize("case", CASE)
@pytest.mark.parametrize("rule", RULES)
def test_result_does_not_depend_on_the_order_of_kv_heads(rule, case) -> None:
    scores, observation = scored_view(CASE[case])
    order, old = [2, 0, 1], observation.entries
    turned = replace(
        old,
        starts=tuple(old.starts[head] for head in order),
        lengths=tuple(old.lengths[head] for head in order),
    )
    parts = scores.split(old.lengths)
    straight = split(rule(scores, observation), observation)
    other = replace(observation, entries=turned)
    got = split(rule(torch.cat([parts[head] for head in order]), other), other)
    assert_equal(got, [straight[head] for head in order])


@pytest.mark.parametrize("rule", RULES)
def test_inputs_are_not_modified(rule) -> None:
    scores, observation = scored_view(CASE["negative"])
    tensors = (
        scores,
        observation.entries.values,
        observation.entries.keys,
        observation.entries.positions,
    )
    before = [tensor.clone() for tensor in tensors]
    rule(scores, observation)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_unowned_rows_are_ignored(rule) -> None:
    scores, observation = scored_view(CASE["plain"])
    values = torch.full_like(observation.entries.values, 1e4)
    for head in heads_of(observation):
        values[observation.entries.rows(head)] = observation.entries.head_values(head)
    spoiled = replace(observation, entries=replace(observation.entries, values=values))
    assert torch.equal(rule(scores, spoiled), rule(scores, observation))


@pytest.mark.parametrize("rule", RULES)
def test_half_precision_is_weighted_in_float32(rule) -> None:
    scores, observation = scored_view(CASE["plain"])
    values = observation.entries.values.bfloat16()
    low = rule(scores, replace(observation, entries=replace(observation.entries, values=values)))
    wide = rule(
        scores, replace(observation, entries=replace(observation.entries, values=values.float()))
    )
    assert torch.equal(low, wide)


def test_caote_is_the_change_of_the_output() -> None:
    scores, observation = scored_view([{0: 3.0, 1: 1.0, 2: 0.0}])
    observation.entries.values[observation.entries.rows(0)] = torch.eye(3, 8) * torch.tensor(
        [[4.0], [4.0], [9.0]]
    )
    moved = math.dist([3.0, 1.0], [0.0, 4.0]), math.dist([3.0, 1.0], [4.0, 0.0]), 0.0
    assert Caote().weigh(scores, observation).tolist() == pytest.approx(list(moved))


@pytest.mark.parametrize("heavy", [1e3, 1e6, 1e9])
def test_caote_is_accurate_for_a_dominant_entry(loop_of, heavy) -> None:
    scores, seen = scored_view([{0: 1.0, 1: heavy, 2: 0.5, 3: 2.0}])
    expected = loop_of(Caote()).weighed(Caote(), split(scores, seen), values_of(seen))
    got = split(Caote().weigh(scores, seen), seen)
    assert got[0] == pytest.approx(expected[0], rel=1e-4)
    assert max(got[0]) == got[0][1]


def test_criticality_counts_large_values_with_little_attention() -> None:
    scores, observation = scored_view([{0: 0.0, 1: 0.0, 2: 0.3}])
    values = observation.entries.values
    values[:3] = torch.tensor([[1.0], [-2.0], [0.001]])
    got = Criticality(epsilon=0.1).weigh(scores, observation).tolist()
    assert got == pytest.approx([0.8, 1.6, 0.0032])


def test_units_share_one_score_over_their_finite_entries() -> None:
    scores, seen = scored_view(
        [{0: 1.0, 1: INF, 2: 3.0, 3: 5.0, 7: -INF, 8: 4.0}, {2: 8.0, 5: 6.0}]
    )
    assert Chunk(size=3).pool(scores, seen).tolist() == [2.0, INF, 2.0, 5.0, -INF, 4.0, 8.0, 6.0]
    assert Chunk(size=4).pool(scores, seen).tolist() == [3.0, INF, 3.0, 3.0, -INF, 4.0, 8.0, 6.0]
    window = Window(size=4, best=0.5)
    assert window.pool(scores, seen).tolist() == [4.0, INF, 4.0, 4.0, -INF, 4.0, 8.0, 6.0]


def test_window_averaging_all_equals_a_chunk() -> None:
    scores, seen = scored_view(CASE["negative"])
    whole = Window(size=3, best=1.0).pool(scores, seen)
    assert torch.equal(whole, Chunk(size=3).pool(scores, seen))


def test_question_text_uses_the_best_half_of_a_window() -> None:
    scores, seen = scored_view([{n: float(n % 4) for n in range(8)}])
    asking = replace(seen, ids=(3, 9, 4), lexicon={"question_marks": frozenset({9})})
    long_ago = replace(asking, ids=(9, *[4] * 32))
    found = Window(size=4, best=0.5, task=Task.FOUND)
    for other, expected in ((asking, 2.5), (long_ago, 1.5), (seen, 1.5)):
        assert found.pool(scores, other).tolist() == [expected] * 8
    assert Window(size=4, best=0.5).pool(scores, long_ago).tolist() == [2.5] * 8


def test_window_share_is_rounded_correctly() -> None:
    assert 0.29 * 100 < 29
    scores, seen = scored_view([{index: float(index < 28) for index in range(100)}])
    pooled = Window(size=100, best=0.29).pool(scores, seen)
    assert pooled.tolist() == pytest.approx([28 / 29] * 100)


def test_entropy_chunk_splits_uneven_chunks() -> None:
    """Means 10, 9, 1 and 2: the first is one token's, and keeps two of four; 2 and 3 come last."""
    observation = a_view(a_layer(1, 1), [range(16)], 1)
    numbers = [36, 2, 1.1, 1, 9, 9.1, 9.2, 8.7, 1, 1.1, 0.9, 0.95, 2, 2.1, 2.2, 1.7]
    ranks = EntropyChunk(size=4, spiky=2).pool(torch.tensor(numbers), observation)
    order = ranks.argsort(descending=True).tolist()
    assert order == [0, 1, 6, 5, 4, 7, 14, 13, 12, 15, 9, 8, 11, 10, 2, 3]
    assert sorted(ranks.tolist()) == list(range(1, 17))
    for wrong in ({"size": 0}, {"spiky": 0}, {"layers": 0}):
        with pytest.raises(BadParameter, match=r"entropy_chunk\.\w+ must be at least 1, got 0"):
            EntropyChunk(**wrong)


def test_units_are_kept_whole_within_the_budget() -> None:
    observation = a_view(a_layer(2, 2), [list(range(24))] * 2, 3)
    sentence = "protect(sinks=0, recent=0) > column_mass() > chunk(size=4) > uniform(tokens=8)"
    planner = Policy.parse(sentence).planner
    scored = planner.with_protection(observation, planner.score(observation), 8)
    plan = planner.plan({0: scored}, {0: 8}, lambda index: observation.entries)[0]
    for head in (plan.kept[:8], plan.kept[8:] - 24):
        assert len(set((head // 4).tolist())) == 2


def test_policy_with_value_rule_and_unit_round_trips_and_scores() -> None:
    policy = Policy.parse(
        "snapkv(window=2) > mean_variance(gamma=2.0) > group_max() > caote() > chunk(size=3) > "
        "pooled(tokens=64)"
    )
    assert "mean_variance(gamma=2.0) > group_max() > caote() > chunk(size=3, " in str(policy)
    assert Policy.parse(str(policy)) == policy
    observation = a_view(a_layer(2, 2), [[0, 1, 2, 4, 5, 6, 9, 10], [3, 9, 10]], 2)
    scores = policy.planner.score(observation)
    assert scores.isposinf().tolist() == [False] * 6 + [True, True, False, True, True]
    assert scores[0] == scores[1] == scores[2] != scores[3] == scores[4] != scores[5]


WRONG = {
    "criticality.epsilon": [-1.0, INF, math.nan],
    "chunk.size": [0, -3],
    "chunk.layers": [0],
    "window.layers": [0],
    "window.size": [0, -3],
    "window.best": [0.0, 1.1, math.nan],
}


@pytest.mark.parametrize("named", WRONG)
def test_parameters_out_of_range_are_refused(named) -> None:
    part, parameter = named.split(".")
    kind = {"criticality": Criticality, "chunk": Chunk, "window": Window}[part]
    for value in WRONG[named]:
        with pytest.raises(BadParameter, match=re.escape(f"{named} must be")):
            kind(**{parameter: value})


def test_value_rule_is_frozen_and_cited(values) -> None:
    frozen_and_cited(values)


def test_unit_is_frozen_and_cited(unit) -> None:
    frozen_and_cited(unit)


def frozen_and_cited(part: Any) -> None:
    for field in fields(part):
        with pytest.raises(FrozenInstanceError):
            setattr(part, field.name, None)
    module = inspect.getmodule(type(part))
    assert PAPER.search(module.__doc__), module.__name__
