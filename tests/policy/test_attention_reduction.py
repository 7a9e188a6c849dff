"""Many queries and query heads become one number per entry, as the loops say."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import larder.policy.attention_reduction as attention_reduction
from builders import a_layer, a_view
from larder import Policy
from larder.core import BadParameter, Observation
from larder.ops import CHUNK, c_library
from larder.policy import (
    AttentionReduction,
    Defensive,
    Ema,
    GroupMax,
    GroupMean,
    LayerMean,
    Max,
    Mean,
    MeanVariance,
    ObservationWindow,
    ScaledMean,
    Sum,
)
from references import layer_mean
from references.attention_loop import group_of, heads_of, positions_of, weights
from tensor_memory import LargestTensor

PAPER = re.compile(r"\(20\d\d\),\s+arXiv:\d{4}\.\d{5}|[Nn]o paper")
UNEVEN = [[0, 1, 4, 5, 9, 10, 11], [2, 3, 9, 10, 11], [0, 5, 9, 10, 11]]


def view(group: int = 2, heads: list[list[int]] = UNEVEN, queries: int = 3) -> Observation:
    return a_view(a_layer(len(heads), group), heads, queries)


def some_weights(queries: int, entries: int, heads: int = 2, seed: int = 0) -> Tensor:
    """Rows that sum to 1, in which early queries do not see late entries."""
    logits = 2 * torch.randn(heads, queries, entries, generator=torch.Generator().manual_seed(seed))
    late = torch.arange(entries) - torch.arange(queries)[:, None] > entries // 2
    return logits.masked_fill(late, -torch.inf).softmax(-1)


def streamed(aggregation: Any, rows: Tensor, chunk: int) -> Tensor:
    """Aggregate of weights that are handed over in a reused buffer."""
    total = rows.shape[1]
    state = aggregation.start(torch.zeros(rows.shape[0], rows.shape[2]))
    for first in range(0, total, chunk):
        buffer = rows[:, first : first + chunk].clone()
        aggregation.fold(state, buffer, first, total)
        assert torch.equal(buffer, rows[:, first : first + chunk])
        buffer.fill_(torch.nan)
    return aggregation.finish(state, total)


@given(
    queries=st.integers(1, 7),
    entries=st.integers(1, 6),
    heads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_aggregation_equals_its_reference_for_any_chunk_size(
    aggregation, loop_of, queries, entries, heads, seed
) -> None:
    rows = some_weights(queries, entries, heads, seed)
    expected = [loop_of(aggregation).joined(aggregation, head) for head in rows.tolist()]
    for chunk in (1, 2, queries):
        got = streamed(aggregation, rows, chunk)
        assert got.dtype is torch.float32
        assert got.shape == (heads, entries)
        for one, other in zip(got.tolist(), expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_aggregation_without_queries_is_zero(aggregation) -> None:
    assert streamed(aggregation, torch.zeros(2, 0, 3), 1).tolist() == [[0.0] * 3] * 2


@given(
    held=st.lists(st.sets(st.integers(0, 12), max_size=8), min_size=1, max_size=3),
    group=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_head_rule_equals_its_reference(heads, loop_of, held, group, seed) -> None:
    layer, positions = a_layer(len(held), group), [sorted(head) for head in held]
    source = torch.Generator().manual_seed(seed)
    statistics = [torch.rand(group, len(head), generator=source) for head in positions]
    before = [head.clone() for head in statistics]
    observation = a_view(layer, positions)
    got = heads.join(statistics, observation.entries, observation)
    expected = loop_of(heads).joined(heads, [head.tolist() for head in statistics], positions)
    assert_equal(got, expected)
    assert all(torch.equal(a, b) for a, b in zip(statistics, before, strict=True))


def assert_equal(got: list[Tensor], expected: list[list[float]]) -> None:
    assert [len(head) for head in got] == [len(head) for head in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is torch.float32
        assert one.tolist() == pytest.approx(other, rel=1e-5, abs=1e-6)


def looped(
    joining: AttentionReduction, observation: Observation, causal: bool, loop_of: Any
) -> list[list[float]]:
    """Softmax weights, aggregation and head rule, all by loops."""
    positions = [positions_of(observation.entries, head) for head in heads_of(observation)]
    statistics = []
    for head in heads_of(observation):
        rows = [
            [
                row_of(observation, query_head, query, positions[head], causal)
                for query in queries_of(observation)
            ]
            for query_head in group_of(observation, head)
        ]
        loop = loop_of(joining.aggregation)
        statistics.append([loop.joined(joining.aggregation, query_head) for query_head in rows])
    own = loop_of(joining.heads).joined(joining.heads, statistics, positions)
    loop = loop_of(joining.aggregation)
    if not joining.aggregation.depends_on_other_entries:
        return own
    return [loop.completed(joining.aggregation, head) for head in own]


def queries_of(observation: Observation) -> range:
    return range(observation.queries.shape[1])


def row_of(
    observation: Observation, query_head: int, query: int, positions: list[int], causal: bool
) -> list[float]:
    at = int(observation.query_positions[query])
    visible = [not causal or position <= at for position in positions]
    return (
        weights(observation, query_head, query, visible) if any(visible) else [0.0] * len(visible)
    )


@pytest.mark.parametrize("causal", [True, False])
def test_reduction_equals_its_reference_on_uneven_heads(
    aggregation, heads, loop_of, causal
) -> None:
    observation, joining = view(), AttentionReduction(aggregation, heads)
    positions = observation.query_positions if causal else None
    got = joining.reduce(
        ObservationWindow(observation.queries, observation.entries, positions), observation
    )
    assert_equal(got, looped(joining, observation, causal, loop_of))


@pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")
@pytest.mark.parametrize(("reduction", "takes_kernel"), [(Max(), True), (Defensive(), False)])
def test_largest_weights_of_all_heads_come_from_one_call(
    reduction, takes_kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    kernel = attention_reduction.largest_weights
    monkeypatch.setattr(
        attention_reduction, "largest_weights", lambda *a: calls.append(1) or kernel(*a)
    )
    observation = view()
    window = ObservationWindow(observation.queries, observation.entries)
    found = AttentionReduction(reduction, GroupMax()).reduce(window, observation)
    assert calls == [1] * takes_kernel
    monkeypatch.setattr(attention_reduction, "supports", lambda *_: False)
    torch.testing.assert_close(
        found, AttentionReduction(reduction, GroupMax()).reduce(window, observation)
    )


def test_reduction_with_blind_queries_and_empty_heads_equals_its_reference(
    aggregation, heads, loop_of
) -> None:
    observation = view(heads=[[], [5, 6, 7], [0, 1, 2, 6, 7]])
    joining = AttentionReduction(aggregation, heads)
    assert int(observation.query_positions[0]) == 5
    early = replace(observation, query_positions=observation.query_positions - 2)
    got = joining.reduce(
        ObservationWindow(early.queries, early.entries, early.query_positions), early
    )
    assert_equal(got, looped(joining, early, True, loop_of))


def test_attention_weights_are_streamed_in_chunks(aggregation, heads) -> None:
    queries, entries, group = 8 * CHUNK, 32, 2
    observation = view(group, [list(range(600 - entries, 600))] * 2, queries)
    with LargestTensor() as largest:
        AttentionReduction(aggregation, heads).reduce(
            ObservationWindow(observation.queries, observation.entries), observation
        )
    assert 2 * group * CHUNK * entries <= largest.numbers < group * queries * entries


def test_observation_is_not_modified(aggregation, heads) -> None:
    observation = view()
    tensors = (
        observation.queries,
        observation.query_positions,
        observation.entries.keys,
        observation.entries.positions,
    )
    before = [tensor.clone() for tensor in tensors]
    AttentionReduction(aggregation, heads).reduce(
        ObservationWindow(observation.queries, observation.entries, observation.query_positions),
        observation,
    )
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_result_does_not_depend_on_the_order_of_kv_heads(aggregation, heads) -> None:
    scores = (0.1, 0.7, 0.3, 0.2, 0.9, 0.0)
    observation, order = replace(view(), calibration={"retrieval": scores}), [2, 0, 1]
    joining, old = AttentionReduction(aggregation, heads), observation.entries
    rows = [
        head * observation.layer.group + r for head in order for r in range(observation.layer.group)
    ]
    turned = replace(
        old,
        starts=tuple(old.starts[head] for head in order),
        lengths=tuple(old.lengths[head] for head in order),
    )
    straight = joining.reduce(
        ObservationWindow(observation.queries, old, observation.query_positions), observation
    )
    other = replace(observation, calibration={"retrieval": tuple(scores[row] for row in rows)})
    got = joining.reduce(
        ObservationWindow(observation.queries[rows], turned, observation.query_positions), other
    )
    assert_equal(got, [straight[head].tolist() for head in order])


def test_half_precision_is_reduced_in_float32(aggregation, heads) -> None:
    observation, joining = view(), AttentionReduction(aggregation, heads)
    keys, queries = observation.entries.keys.bfloat16(), observation.queries.bfloat16()
    low = joining.reduce(
        ObservationWindow(queries, replace(observation.entries, keys=keys)), observation
    )
    wide = joining.reduce(
        ObservationWindow(queries.float(), replace(observation.entries, keys=keys.float())),
        observation,
    )
    assert_equal(low, [head.tolist() for head in wide])


def test_small_variance_around_a_large_mean_is_accurate() -> None:
    noise = torch.randn(1, 64, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = (0.9 + 1e-4 * noise).float()
    gamma = 1e9
    for chunk in (1, 7, 64):
        got = (streamed(MeanVariance(gamma), rows, chunk) - 0.9) / gamma
        assert got.tolist()[0] == pytest.approx(rows.double().var(1).tolist()[0], rel=1e-3)


def test_special_cases_of_aggregations_equal_each_other() -> None:
    rows = some_weights(5, 4)
    mean = streamed(Mean(), rows, 2)
    assert torch.allclose(streamed(Ema(beta=1.0), rows, 2), mean)
    assert torch.allclose(streamed(Ema(beta=0.0), rows, 2), rows[:, -1])
    assert torch.allclose(streamed(MeanVariance(gamma=0.0), rows, 2), mean)
    assert torch.allclose(streamed(Sum(), rows, 2), 5 * mean)
    assert streamed(MeanVariance(), rows[:, :1], 1).allclose(rows[:, 0])
    worst = Defensive(kernel=1)
    risk = streamed(worst, rows, 2)
    assert torch.allclose(risk, streamed(Max(), rows, 2))
    lifted = worst.complete(risk[0])
    assert torch.equal(lifted[lifted > risk[0].mean()], risk[0][risk[0] == lifted])
    assert (lifted > risk[0]).any()


def test_scaled_mean_of_uniform_attention_is_one() -> None:
    rows = torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]]])
    assert streamed(ScaledMean(), rows[:, 2:], 1).tolist() == [[1.0, 1.0, 1.0, 1.0]]
    assert streamed(ScaledMean(), rows[:, :2], 1).tolist() == [[1.0, 0.5, 0.0, 0.0]]
    assert streamed(Mean(), rows[:, :2], 1).tolist() == [[0.75, 0.25, 0.0, 0.0]]


def test_recorded_logits_are_scaled_by_the_entries_of_each_head() -> None:
    # What attention left behind of one query holds all heads: 2 entries here, 8 there.
    observation = view(1, [[0, 1], list(range(8))], 1)
    observation = replace(observation, queries=torch.zeros_like(observation.queries))
    observation = replace(observation, logits=torch.zeros(1, len(observation.entries.positions)))
    joining = AttentionReduction(ScaledMean(), GroupMean())
    assert_equal(
        joining.reduce(ObservationWindow(observation.queries, observation.entries), observation),
        [[1.0] * 2, [1.0] * 8],
    )


def test_layer_mean_keeps_the_same_entries_in_all_heads_and_group_mean_does_not() -> None:
    sentence = "protect(sinks=1, recent=1) > snapkv(window=2, kernel=3) > {} > uniform(tokens=6)"
    held = [list(range(20))] * 3
    kept = {}
    for rule in (LayerMean(), GroupMean()):
        name = "layer_mean()" if rule == LayerMean() else "group_mean()"
        planner = Policy.parse(sentence.format(name)).planner
        observation = view(2, held, 5)
        scored = planner.with_protection(observation, planner.score(observation), 6)
        plan = planner.plan(
            {0: scored}, {0: 6}, lambda index, observation=observation: observation.entries
        )[0]
        heads = torch.split(plan.kept, list(plan.lengths))
        kept[name] = [(head - 20 * index).tolist() for index, head in enumerate(heads)]
    assert kept["layer_mean()"][0] == kept["layer_mean()"][1] == kept["layer_mean()"][2]
    assert kept["group_mean()"][0] != kept["group_mean()"][1]


def test_layer_mean_matches_entries_of_heads_by_position() -> None:
    layer = a_layer(2, 1)
    observation = a_view(layer, [[0, 3, 7], [3, 9]])
    statistics = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[6.0, 5.0]])]
    joined = LayerMean().join(statistics, observation.entries, observation)
    assert [head.tolist() for head in joined] == [[1.0, 4.0, 3.0], [4.0, 5.0]]


def test_layer_mean_equals_its_reference_on_equal_and_uneven_heads() -> None:
    layer = a_layer(3, 2)
    whole = [0, 3, 7, 9]
    for held in ([whole] * 3, [whole, whole, [0, 3, 7, 8]], [whole, whole, [0, 3]], [[]] * 3):
        observation = a_view(layer, held)
        source = torch.Generator().manual_seed(len(held[2]))
        statistics = [torch.rand(2, len(positions), generator=source) for positions in held]
        joined = LayerMean().join(statistics, observation.entries, observation)
        expected = layer_mean.joined(None, [rows.tolist() for rows in statistics], held)
        for head, wanted in zip(joined, expected, strict=True):
            assert head.tolist() == pytest.approx(wanted)


WRONG = {
    "mean_variance.gamma": [-1.0, float("inf"), float("nan")],
    "ema.beta": [-0.1, 1.1, float("nan")],
}


@pytest.mark.parametrize("named", WRONG)
def test_parameters_out_of_range_are_refused(named) -> None:
    part, parameter = named.split(".")
    kind = {"mean_variance": MeanVariance, "ema": Ema}[part]
    for value in WRONG[named]:
        with pytest.raises(BadParameter, match=re.escape(f"{named} must be")):
            kind(**{parameter: value})


def frozen_and_cited(part: Any) -> None:
    for field in fields(part):
        with pytest.raises(FrozenInstanceError):
            setattr(part, field.name, None)
    module = inspect.getmodule(type(part))
    assert PAPER.search(module.__doc__), module.__name__


def test_aggregation_is_frozen_and_cited(aggregation) -> None:
    frozen_and_cited(aggregation)


def test_head_rule_is_frozen_and_cited(heads) -> None:
    frozen_and_cited(heads)
