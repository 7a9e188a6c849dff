"""Storage of kept entries: grades equal to loops, within the bytes of the budget."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer, a_plan, a_view
from larder.core import (
    BadParameter,
    BudgetError,
    Coder,
    Entries,
    Folds,
    Grid,
    LayerScores,
    Observation,
    Plan,
    ScoreError,
    StorageStatistics,
    public_name,
)
from larder.policy import (
    ARKV,
    QAQ,
    RDKV,
    Aqua,
    Exact,
    KVQuant,
    MiKV,
    MiniCache,
    Quantized,
    QuantizedPairs,
    ThinK,
    Transform,
    TurboQuant,
    channel_balance,
    demote_groups,
    kept_key_energies,
    needed_bits,
    query_energies,
)
from larder.session import FAMILIES

PARTS = (
    Exact(),
    Quantized(bits=4, group=2),
    Quantized(bits=2, group=3, outliers=0.1),
    MiKV(important=0.3, group=2),
    MiKV(important=0.5, high=8, low=2, group=2, balance=0.0),
    ARKV(group=2),
    QAQ(group=2, key_error=0.02, value_error=0.05, window=4, outliers=0.1),
    ThinK(group=3),
    MiniCache(recent=3),
    QuantizedPairs(group=2),
    Transform(sinks=2, recent=3),
    Aqua(sinks=2, recent=3),
    RDKV(group=2),
    RDKV(group=2, window=0),
    TurboQuant(group=2),
    KVQuant(sinks=2, recent=3),
)
POSITIONS = ([0, 1, 2, 3, 5, 6, 8, 9, 10, 11], [0, 2, 4, 9, 10, 11], [1, 6, 7, 8, 9, 10, 11])


def judged(part: Any, seed: int, is_graded: bool) -> tuple[Observation, LayerScores]:
    """A layer of three heads, some entries of which may have a grade already."""
    observation = a_view(a_layer(3, 2), POSITIONS, queries=6, seed=seed)
    source = torch.Generator().manual_seed(seed)
    if is_graded:
        most = len(part.codecs)
        grades = torch.randint(0, most + 1, (len(observation.entries.keys),), generator=source)
        entries = replace(observation.entries, grades=grades.to(torch.int8))
        observation = replace(observation, entries=entries)
    total = sum(observation.entries.lengths)
    scores = torch.randint(0, 5, (total,), generator=source).float()
    protected = torch.rand(total, generator=source) < 0.1
    inspected = part.inspect(observation)
    return observation, LayerScores(
        scores, protected, observation.entries.lengths, storage_statistics=inspected
    )


@pytest.mark.parametrize("part", PARTS, ids=str)
@given(st.integers(0, 99), st.booleans(), st.integers(2, 12), st.floats(0, 1))
@settings(max_examples=15, deadline=None)
def test_grades_equal_their_reference(
    part: Any, seed: int, is_graded: bool, quota: int, share: float
) -> None:
    share = share if isinstance(part, ARKV) else 1.0
    observation, scored = judged(part, seed, is_graded)
    entries = observation.entries
    plan = a_plan([range(1, len(head), 1 + seed % 2) for head in POSITIONS], entries.lengths)
    targets = plan.kept[seed % 3 :: 4]
    ones = torch.ones(len(targets))
    plan = replace(plan, folds=Folds(torch.zeros_like(targets), targets, ones, ones))
    reference = import_module(f"references.{public_name(type(part))}")
    expected = reference.grades(part, plan, entries, scored, quota, share)
    graded = part.grade(plan, entries, scored, quota, share)
    assert (graded.grades.tolist() or [0] * len(plan.kept)) == expected
    assert graded.kept is plan.kept


def test_demotion_takes_whole_groups_of_the_lowest_scores() -> None:
    ranked = torch.tensor([3.0, 1.0, 1.0, 1.0, 5.0, 0.5])
    held = torch.zeros(6, dtype=torch.int8)
    assert demote_groups(ranked, held, [5], [2]).tolist() == [0, 1, 0, 0, 0, 1]
    assert demote_groups(ranked, held, [3], [2]).tolist() == [0, 1, 1, 1, 0, 1]
    assert demote_groups(ranked, held, [2, 1], [2, 1]).tolist() == [0, 2, 2, 1, 0, 2]
    assert demote_groups(ranked, held, [6], [4]).tolist() == [0] * 6


@pytest.mark.parametrize(
    "part", [each for each in PARTS if each.codecs and not isinstance(each, RDKV)], ids=str
)
@given(st.integers(8, 3000), st.sampled_from([32, 64, 128]), st.sampled_from([2, 4]))
@settings(max_examples=25, deadline=None)
def test_entries_fit_the_byte_budget(part: Any, tokens: int, size: int, itemsize: int) -> None:
    part, layer = replace(part, group=16), replace(a_layer(), head_dim=size)
    full = 2 * size * itemsize + 4
    try:
        quota = part.entries(tokens, [layer], itemsize)
    except BudgetError:
        return
    rooms = part.capacities(quota, size, itemsize)
    costs = [full, *(codec.bytes_per_entry(size, itemsize) for codec in part.codecs)]
    if isinstance(part, QAQ):
        rooms, costs = rooms[:1], costs[:2]
    rooms.append(quota - sum(rooms))
    assert min(rooms) >= 0
    assert sum(room * cost for room, cost in zip(rooms, costs, strict=True)) <= tokens * full + 1
    assert part.full_precision_entries(quota, layer, itemsize) <= quota


def test_budget_below_one_full_precision_group_is_refused() -> None:
    with pytest.raises(BudgetError, match="32 that .*quantized.* full precision"):
        Quantized().entries(32, [replace(a_layer(), head_dim=64)], 4)
    assert Quantized().entries(33, [replace(a_layer(), head_dim=64)], 4) >= 33


def test_group_too_small_to_save_bytes_is_refused() -> None:
    with pytest.raises(BudgetError, match="raise its group"):
        Quantized(group=1).entries(100, [replace(a_layer(), head_dim=64)], 2)


def test_tokens_of_aqua_fill_the_bytes_of_the_budget() -> None:
    layers = [replace(a_layer(3, 3, index=index), head_dim=64) for index in range(30)]
    # 104 bytes in 29 layers and 200 in the first, where an exact token takes 3 * (256 + 4).
    more = 100 * 30 * 780 / (29 * 104 + 200)
    assert Aqua().entries(232, layers, 2) == 132 + int(more)
    with pytest.raises(BudgetError, match="132 that .*aqua.* keeps exact"):
        Aqua().entries(132, layers, 2)
    with pytest.raises(BudgetError, match="as many bytes"):
        Aqua(bits=4).entries(500, [replace(a_layer(1, 1), head_dim=2)], 1)


def test_entries_of_kvquant_fill_the_bytes_of_the_budget() -> None:
    layer = replace(a_layer(), head_dim=64)
    # 48 bytes of codes, a range, 2.56 and 3 bytes of outliers, and .75 beside: 260 when exact.
    assert KVQuant().entries(101, [layer], 2) == 1 + int(100 * 260 / 58.31)
    assert KVQuant().full_precision_entries(1 + 446, layer, 2) == 1 + 100
    assert KVQuant(bits=2).entries(101, [layer], 2) > KVQuant().entries(101, [layer], 2)


def test_fewer_bits_hold_more_entries() -> None:
    layer = replace(a_layer(), head_dim=128)
    counts = [Quantized(bits=bits).entries(1000, [layer], 2) for bits in (8, 4, 2)]
    assert 1000 < counts[0] < counts[1] < counts[2]


def test_arkv_layer_preference_equals_its_reference() -> None:
    from references.arkv import preference

    for part in (ARKV(), ARKV(tau1=0.7, tau2=2.0, tau3=1.3, window=4)):
        for seed in range(3):
            observation = a_view(a_layer(3, 2), POSITIONS, queries=6, seed=seed)
            observation = replace(observation, entries=replace(observation.entries, columns={}))
            found = part.inspect(observation).numbers[0]
            assert found == pytest.approx(math.log(preference(part, observation)), abs=1e-3)


def test_arkv_layers_are_compared_with_the_best() -> None:
    statistics = [StorageStatistics(numbers=(math.log(n),)) for n in (2.0, 8.0, 4.0)]
    assert ARKV().compare(statistics) == pytest.approx([0.25, 1.0, 0.5])
    assert Exact().compare(statistics) == [1.0] * 3


def test_qaq_bits_hand_values() -> None:
    # 1000 entries, an error of .01, a range of 4: steps of twice sqrt(12 / 1000) * .01 / weight.
    weights = torch.tensor([0.5, 0.01, 0.001])
    deviation = math.sqrt(12 / 1000) * 0.01 / weights
    assert needed_bits(torch.full((3,), 4.0), deviation).tolist() == [10.0, 5.0, 2.0]
    vectors = torch.tensor([-2.0, 0.0, 2.0]).repeat(1000, 1)
    part = QAQ(value_error=0.01, outliers=0.0, window=1)
    bits = graded(part, vectors, torch.cat([weights, torch.full((997,), 0.0001)]))
    assert bits[:4] == [8, 5, 2, 1]  # no more than the most


def graded(part: QAQ, vectors: torch.Tensor, weights: torch.Tensor) -> list[int]:
    """Bits of the values of one head with these weights."""
    count = len(vectors)
    positions = torch.arange(count, dtype=torch.int32)
    entries = Entries(torch.zeros_like(vectors), vectors, positions, (0,), (count,))
    seen = StorageStatistics(weights=weights, numbers=(1.0,))
    scores, spared = torch.zeros(count), torch.zeros(count, dtype=torch.bool)
    grades = part.sufficient_grades(
        entries, LayerScores(scores, spared, (count,), storage_statistics=seen)
    )
    return [part.tiers()[grade - 1].codec.value_bits for grade in grades.tolist()]


@pytest.mark.extended
def test_qaq_outliers_do_not_widen_the_range() -> None:
    vectors = torch.linspace(-1, 1, 201).repeat(1000, 1)
    vectors[:, 0], vectors[:, -1] = -100.0, 100.0
    weights = torch.full((1000,), 0.01)
    parameters = {"value_error": 0.05, "window": 1}
    assert graded(QAQ(**parameters, outliers=0.01), vectors, weights) == [2] * 1000
    assert graded(QAQ(**parameters, outliers=0.0), vectors, weights) == [8] * 1000


def test_qaq_newest_tokens_take_the_most_bits() -> None:
    vectors, weights = torch.linspace(-1, 1, 64).repeat(100, 1), torch.full((100,), 1e-6)
    assert graded(QAQ(window=32), vectors, weights) == [1] * 69 + [8] * 31


def test_qaq_statistics_equal_their_reference() -> None:
    from references.qaq import looked_at

    part = QAQ(window=4)
    observation = a_view(a_layer(3, 2), POSITIONS, queries=6, seed=3)
    observation = replace(observation, entries=replace(observation.entries, columns={}))
    found = part.inspect(observation)
    assert found.weights.tolist() == pytest.approx(looked_at(part, observation), abs=1e-5)
    norms = (observation.queries[:, -4:] * observation.layer.scaling).square().sum(-1).flatten()
    assert found.numbers[0] == pytest.approx(float(norms.quantile(0.9)))


@given(st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=12), st.floats(0.1, 0.9))
@settings(max_examples=30, deadline=None)
def test_rdkv_widths_equal_their_reference(weights: list[float], share: float) -> None:
    from references.rdkv import WIDTHS, widths

    part, layer = RDKV(group=16), replace(a_layer(), head_dim=64)
    itemsize = 2
    codes = [codec.bytes_per_entry(64, itemsize) for codec in part.codecs]
    costs = dict(zip(WIDTHS, [2 * 64 * itemsize + 4, *codes, 0.0], strict=True))
    allowed = int(share * costs[16] * len(weights))
    half = len(weights) // 2
    plans, held = {}, {}
    for index, own in enumerate((weights[:half], weights[half:])):
        positions = torch.arange(len(own), dtype=torch.int32)
        vectors = torch.zeros(len(own), layer.head_dim, dtype=torch.bfloat16)
        held[index] = Entries(vectors, vectors, positions, (0,), (len(own),))
        plans[index] = replace(
            a_plan([range(len(own))], (len(own),)),
            grades=torch.zeros(len(own), dtype=torch.int8),
            importance=torch.tensor(own, dtype=torch.float64).log2(),
            allowed_bytes=allowed // 2 if index else allowed - allowed // 2,
        )
    found = part.allocate(plans, held.__getitem__)
    expected = widths(weights, costs, allowed)
    for index, own in enumerate((expected[:half], expected[half:])):
        kept = [position for position, bits in enumerate(own) if bits]
        assert found[index].kept.tolist() == kept and found[index].lengths == (len(kept),)
        grades = [WIDTHS.index(bits) for bits in own if bits]
        assert found[index].grades.tolist() == grades


def test_rdkv_keeps_weightless_entries_in_the_remaining_budget() -> None:
    part, (observation, scored) = RDKV(group=2, window=0), judged(RDKV(group=2, window=0), 5, False)
    nothing = replace(scored, scores=torch.zeros_like(scored.scores))
    plan = a_plan([range(len(head)) for head in POSITIONS], observation.entries.lengths)
    for held, quota in ((scored, 10_000), (nothing, 10_000)):
        graded = part.grade(plan, observation.entries, held, quota, 1.0)
        found = part.allocate({0: graded}, lambda _: observation.entries)[0]
        assert found.kept.tolist() == plan.kept.tolist() and not bool(found.grades.any())


def test_rdkv_refuses_negative_scores() -> None:
    part, (observation, scored) = RDKV(group=2, window=0), judged(RDKV(group=2, window=0), 5, False)
    plan = a_plan([range(len(head)) for head in POSITIONS], observation.entries.lengths)
    signed = replace(scored, scores=scored.scores - 1)
    with pytest.raises(ScoreError, match="one is -1: take a scorer"):
        part.grade(plan, observation.entries, signed, 12, 1.0)
    assert len(RDKV(group=2).grade(plan, observation.entries, signed, 12, 1.0).importance)


def test_rdkv_weights_hand_values() -> None:
    part, observation = RDKV(window=4), a_view(a_layer(3, 2), POSITIONS, queries=6, seed=3)
    observation = replace(observation, entries=replace(observation.entries, columns={}))
    found = part.inspect(observation).weights
    first = observation.entries.head_keys(0)
    queries, positions = observation.queries[:2, -4:], observation.query_positions[-4:]
    logits = queries @ first.T * observation.layer.scaling
    hidden = observation.entries.head_positions(0)[None] > positions[:, None]
    squares = logits.masked_fill(hidden, -torch.inf).softmax(-1).square().sum((0, 1))
    energies = observation.entries.head_values(0).square().sum(1)
    assert found[: len(first)].tolist() == pytest.approx((squares * energies).tolist(), rel=1e-4)


def test_channel_energies_and_peak_ratios_equal_their_reference() -> None:
    observation = a_view(a_layer(2, 2), POSITIONS[:2], queries=5, seed=1)
    plan = a_plan([[0, 3, 8], [1, 2, 5]], observation.entries.lengths)
    energy = query_energies(observation, 3) * kept_key_energies(plan, observation.entries)
    peak = channel_balance(observation, 3)
    for head, kept in enumerate([[0, 3, 8], [1, 2, 5]]):
        keys = observation.entries.head_keys(head)
        queries = observation.queries[2 * head : 2 * head + 2, -3:]
        for channel in range(8):
            squares = [float(q[channel]) ** 2 for q in queries.flatten(0, 1)]
            own = [float(k[channel]) ** 2 for k in keys]
            held = [own[position] for position in kept]
            product = sum(squares) / len(squares) * sum(held) / len(held)
            assert float(energy[head, channel]) == pytest.approx(product, rel=1e-4)
            ratio = math.sqrt(max(own) / max(squares))
            assert float(peak[head, channel]) == pytest.approx(ratio, rel=1e-4)


def test_think_weights_channels_by_kept_keys() -> None:
    part = ThinK(group=3)
    observation, scored = judged(part, 5, is_graded=False)
    plan = a_plan([[0, 3, 8], [], [1, 2, 5]], observation.entries.lengths)
    graded = part.grade(plan, observation.entries, scored, 5, 1.0)
    energies = query_energies(observation, part.window) * kept_key_energies(
        plan, observation.entries
    )
    torch.testing.assert_close(graded.channels, energies)
    assert graded.channels[1].tolist() == [0.0] * 8 and bool((graded.channels[0] > 0).all())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("quantized", {"bits": 9}),
        ("quantized", {"group": 0}),
        ("quantized", {"outliers": 1.0}),
        ("mikv", {"important": 1.0}),
        ("mikv", {"high": 2}),
        ("mikv", {"high": 4, "low": 4}),
        ("mikv", {"balance": 2.0}),
        ("mikv", {"window": 0}),
        ("arkv", {"bits": 16}),
        ("arkv", {"tau2": 0.0}),
        ("arkv", {"window": 65}),
        ("arkv", {"window": 1}),
        ("qaq", {"key_error": 0.0}),
        ("qaq", {"value_error": math.inf}),
        ("qaq", {"window": 0}),
        ("think", {"channels": 1.0}),
        ("think", {"group": 0}),
        ("think", {"window": 0}),
        ("transform", {"bits": 0.0}),
        ("transform", {"tiers": -1.0}),
        ("transform", {"recent": -1}),
        ("transform", {"block": 0}),
        ("aqua", {"bits": 5}),
        ("aqua", {"first_bits": 0}),
        ("aqua", {"sinks": -1}),
        ("aqua", {"recent": -1}),
        ("transform", {"metric": 0.3}),
        ("rdkv", {"window": -1}),
        ("rdkv", {"group": 0}),
        ("turboquant", {"bits": 0}),
        ("turboquant", {"keys": Grid.EVEN}),
        ("kvquant", {"bits": 5}),
        ("kvquant", {"outliers": 0.5}),
        ("kvquant", {"sinks": -1}),
        ("kvquant", {"recent": -1}),
        ("kvquant", {"block": 300}),
        ("transform", {"coder": Coder.LEVELS}),
    ],
)
def test_parameters_out_of_range_are_refused(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match=f"{name}\\.{'|'.join(parameters)}"):
        FAMILIES["storage"].load(name)(**parameters)


def test_layers_of_a_pair_keep_the_same_entries_within_their_joint_quota() -> None:
    part = QuantizedPairs(group=2, start=0.0)
    views = [a_view(a_layer(1, 1, index=index), [list(range(40))]) for index in range(2)]
    plans = dict[int, Plan]()
    for index, (seen, quota) in enumerate(zip(views, (36, 12), strict=True)):
        scores = LayerScores(torch.arange(40.0), torch.zeros(40, dtype=torch.bool), (40,))
        plan = a_plan([range(40 - quota, 40)], (40,))
        plans[index] = part.grade(plan, seen.entries, scores, quota, 1.0)
    paired = part.allocate(plans, lambda index: views[index].entries)
    kept = [plan.kept.tolist() for plan in paired.values()]
    assert kept[0] == kept[1]
    assert 2 * len(kept[0]) <= 36 + 12
    assert len(kept[0]) > 20 and kept[0][-1] == 39
