"""Compensations that merge rejected entries: their contract, and hand values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builders import a_plan
from larder.cache import merge_entries
from larder.core import LOG_COUNT, BadParameter, Entries, LayerScores, Phase, Variant, public_name
from larder.policy import CLUSTER, DRAWS, MASS, Chelsea, Elastic, Kvmerger, Razor, Subgen
from references.lococo import learned_tensors
from references.restorekv import learned_entries
from scalar_entries import judged, line, numbers

HELD = (9, 7, 8)
KEPT = [[0, 3, 7, 8], [1, 2, 6], []]
UNNORMALISED = {("fold_ema", Variant.CODE)}  # their released code lets keys and values shrink


def some(heads: list[int], counted: bool = True) -> tuple[Entries, LayerScores]:
    """Random entries of three heads, in any order of heads, without slack."""
    parts: list[list[Tensor]] = []
    for head in heads:
        source, held = torch.Generator().manual_seed(head), HELD[head]
        keys, values = torch.randn(2, held, 4, generator=source)
        positions = torch.randperm(20, generator=source)[:held].sort().values.int()
        logs = torch.randint(0, 3, (held,), generator=source).float() * counted
        mass, scores = torch.rand(2, held, generator=source)
        protected = torch.arange(held) == KEPT[head][0] if KEPT[head] else torch.zeros(held).bool()
        parts.append([keys, values, positions, logs, mass, scores, protected])
    keys, values, positions, logs, mass, scores, protected = (
        torch.cat(together) for together in zip(*parts, strict=True)
    )
    lengths = tuple(HELD[head] for head in heads)
    starts = tuple(sum(lengths[:index]) for index in range(len(lengths)))
    drawn = {name: torch.zeros_like(logs) for name in (CLUSTER, DRAWS)}
    columns = {LOG_COUNT: logs, "mass": mass, **drawn}
    scalars = {name: torch.full((len(heads),), torch.nan) for name in ("tau", MASS)}
    entries = Entries(keys, values, positions, starts, lengths, columns, scalars)
    given = learned_tensors(keys.shape[1]) | learned_entries(len(heads), keys.shape[1])
    return entries, LayerScores(scores, protected, lengths, scalars=scalars, learned=given)


def after(compensation, heads: list[int]) -> dict[int, list[Tensor]]:
    """Keys, values, positions and columns of each head once its plan is carried out."""
    entries, scored = some(heads)
    plan = compensation.compensate(
        a_plan([KEPT[head] for head in heads], scored.lengths), entries, scored
    )
    merged, held = merge_entries(plan, entries), [entries.keys.clone(), entries.values.clone()]
    held[0][merged.targets], held[1][merged.targets] = merged.keys, merged.values
    kept = [*(rows[plan.kept] for rows in held), entries.positions[plan.kept]]
    columns = {name: column[plan.kept] for name, column in entries.columns.items()}
    kept += [column for _, column in sorted({**columns, **plan.columns}.items())]
    split = [list(torch.split(part, plan.lengths)) for part in kept]
    return {head: [part[index] for part in split] for index, head in enumerate(heads)}


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 0, 2]])
def test_merging_does_not_depend_on_the_order_of_heads(compensation, order) -> None:
    expected, got = after(compensation, [0, 1, 2]), after(compensation, order)
    for head in range(3):
        for one, other in zip(expected[head], got[head], strict=True):
            torch.testing.assert_close(one, other)


def test_compensation_keeps_protected_entries(compensation) -> None:
    entries, scored = some([0, 1, 2])
    before = a_plan(KEPT, HELD)
    plan = compensation.compensate(before, entries, scored)
    if isinstance(compensation, Kvmerger | Subgen):  # the threshold or samples decide how many stay
        held = zip(plan.lengths, before.lengths, strict=True)
        assert all(now <= most for now, most in held)
    else:
        assert plan.lengths == before.lengths
    if isinstance(compensation, Chelsea | Kvmerger | Subgen):  # these decide who goes
        assert set(torch.nonzero(scored.protected).flatten().tolist()) <= set(plan.kept.tolist())
    else:
        assert torch.equal(plan.kept, before.kept)


def test_merged_entry_is_a_weighted_mean(compensation) -> None:
    if (public_name(type(compensation)), getattr(compensation, "variant", None)) in UNNORMALISED:
        return
    entries, scored = some([0, 1, 2])
    folds = compensation.compensate(a_plan(KEPT, HELD), entries, scored).folds
    sums = torch.zeros(2, sum(HELD))
    sums[0].index_add_(0, folds.targets, folds.key_weights)
    assert bool((folds.key_weights >= 0).all() and (folds.value_weights >= 0).all())
    targets = folds.targets.unique()
    torch.testing.assert_close(sums[0][targets], torch.ones(len(targets)))
    kind = public_name(type(compensation)), getattr(compensation, "variant", None)
    if kind in (("fold_ema", Variant.LARDER), ("merge_values", None)):  # keys stay as they are
        assert torch.equal(folds.key_weights, (folds.sources == folds.targets).float())
    elif kind[0] not in ("cam", "subgen"):  # values are added to values, or scaled
        assert torch.equal(folds.key_weights, folds.value_weights)


# Anchors at 0, 10 and 14; 3 and 5 go to 0 (5 lies halfway), 7, 11 and 12 (halfway) to 10.
PLACES, NUMBERS = [0, 3, 5, 7, 10, 11, 12, 14], [1.0, 2.0, 6.0, 8.0, 4.0, 3.0, 5.0, 9.0]


@pytest.mark.parametrize(
    "variant, keys, counts",
    [
        # (1 + 2 + 3 * 6) / 5, (2 * 8 + 4 + 3 + 5) / 5
        (Variant.LARDER, [21 / 5, 28 / 5, 9.0], [5, 5, 4]),
        (Variant.PAPER, [9 / 3, 20 / 4, 9.0], [1, 1, 4]),
        # 0 is protected: all that is before 10 goes there.
        (Variant.CODE, [1.0, 28 / 6, 9.0], [1, 1, 4]),
    ],
)
def test_elastic_hand_values(variant, keys, counts) -> None:
    entries = line(PLACES, NUMBERS, [1, 1, 3, 2, 1, 1, 1, 4])
    plan = a_plan([[0, 4, 7]], (8,))
    scored, part = judged([0.0] * 8, (0,)), Elastic(variant)
    got = numbers(part.compensate(plan, entries, scored), entries)
    assert got[0] == pytest.approx(keys) and got[2] == pytest.approx(counts)
    assert got[1] == pytest.approx([10 * key for key in keys])
    later = part.compensate(plan, entries, replace(scored, phase=Phase.DECODE))
    assert bool(len(later.folds)) == (variant is Variant.LARDER)


@pytest.mark.parametrize("part", [Elastic(), Razor()])
def test_merging_at_once_equals_one_by_one(part) -> None:
    # All into entry 0, in one plan or in two: counts make the means agree.
    entries, alone = line([0, 1, 2, 3], [1.0, 2.0, 6.0, 7.0], [1, 1, 1, 1]), judged([1.0, 0, 0, 0])
    [key], [value], [count] = numbers(part.compensate(a_plan([[0]], (4,)), entries, alone), entries)
    first = part.compensate(
        a_plan([[0, 3]], (4,)), line([0, 1, 2, 9], [1.0, 2.0, 6.0, 7.0], [1] * 4), alone
    )
    keys, _, counts = numbers(first, entries)
    between = line([0, 9], keys, [round(n) for n in counts])
    second = part.compensate(a_plan([[0]], (2,)), between, judged([1.0, 0.0]))
    assert numbers(second, between) == (
        [pytest.approx(key)],
        [pytest.approx(value)],
        [pytest.approx(count)],
    )
    assert (key, count) == (pytest.approx(4.0), pytest.approx(4.0))


def test_merged_entry_gets_at_most_the_attention_of_its_tokens() -> None:
    source = torch.Generator().manual_seed(2)
    keys, query = torch.randn(6, 8, generator=source), torch.randn(8, generator=source)
    positions = torch.arange(6, dtype=torch.int32)
    entries = Entries(keys, keys, positions, (0,), (6,), {LOG_COUNT: torch.zeros(6)})
    plan = Elastic().compensate(a_plan([[2]], (6,)), entries, judged([0.0] * 6))
    logit = merge_entries(plan, entries).keys[0] @ query + plan.columns[LOG_COUNT][0]
    assert float(logit) <= float((keys @ query).logsumexp(0))
    assert math.isclose(float(plan.columns[LOG_COUNT][0]), math.log(6), rel_tol=1e-6)


@pytest.mark.parametrize(
    "counts, protected, kept, keys, now",
    [
        # 3 has the lowest score of the kept: (1 + 2 + 6 + 8) / 4
        ([1, 1, 1, 1, 1, 1], (), [0, 3, 5], [4.0, 17 / 4, 3.0], [1, 4, 1]),
        # it is protected, so 5 is the slot: (2 + 6 + 1 + 3) / 4
        ([1, 1, 1, 1, 1, 1], (3,), [0, 3, 5], [4.0, 8.0, 12 / 4], [1, 1, 4]),
        # 0 stands for three already, protected or not: (3 * 4 + 2 + 6 + 1) / 6
        ([3, 1, 1, 1, 1, 1], (0,), [0, 3, 5], [21 / 6, 8.0, 3.0], [6, 1, 1]),
        # the former token, of three, is rejected and joins: (8 + 3 * 2 + 6 + 1) / 6
        ([1, 3, 1, 1, 1, 1], (), [0, 3, 5], [4.0, 21 / 6, 3.0], [1, 6, 1]),
        # of two that stand for several the larger: (3 * 3 + 2 + 6 + 1) / 6
        ([2, 1, 1, 1, 1, 3], (), [0, 3, 5], [4.0, 8.0, 18 / 6], [2, 1, 6]),
        # every slot is protected: what is rejected is gone
        ([1, 1, 1, 1, 1, 1], (0, 3, 5), [0, 3, 5], [4.0, 8.0, 3.0], [1, 1, 1]),
    ],
)
def test_razor_hand_values(counts, protected, kept, keys, now) -> None:
    entries = line([0, 1, 2, 3, 4, 5], [4.0, 2.0, 6.0, 8.0, 1.0, 3.0], counts)
    scored = judged([0.9, 0.1, 0.2, 0.3, 0.0, 0.5], protected)
    got = numbers(Razor().compensate(a_plan([kept], (6,)), entries, scored), entries)
    assert got[0] == pytest.approx(keys) and got[2] == pytest.approx(now)
    assert got[1] == pytest.approx([10 * key for key in keys])


def test_razor_is_exact_for_equal_keys() -> None:
    source = torch.Generator().manual_seed(4)
    keys, values = torch.randn(2, 7, 8, generator=source)
    keys[[1, 2, 4, 5]] = keys[1].clone()
    query, positions = torch.randn(8, generator=source), torch.arange(7, dtype=torch.int32)
    entries = Entries(keys, values, positions, (0,), (7,), {LOG_COUNT: torch.zeros(7)})
    plan = a_plan([[0, 3, 4, 6]], (7,))
    plan = Razor().compensate(plan, entries, judged([1.0, 0, 0, 1, 0.5, 0, 1]))
    merged, keys, values = merge_entries(plan, entries), keys.clone(), values.clone()
    keys[merged.targets], values[merged.targets] = merged.keys, merged.values
    logits = keys[plan.kept] @ query + plan.columns[LOG_COUNT]
    whole = (entries.keys @ query).softmax(0) @ entries.values
    torch.testing.assert_close(logits.softmax(0) @ values[plan.kept], whole)


def a_plane() -> Entries:
    """One head of keys that turn: 0, 10, 30 and 35 degrees, then 90, 95 and 180."""
    angles = torch.tensor([0.0, 10.0, 30.0, 35.0, 90.0, 95.0, 180.0]).deg2rad()
    keys, positions = (
        torch.stack([angles.cos(), angles.sin()], 1),
        torch.arange(7, dtype=torch.int32),
    )
    return Entries(keys, torch.arange(7.0)[:, None].expand(7, 2), positions, (0,), (7,))


@pytest.mark.parametrize(
    "scores, protected, most, degrees, sets",
    [
        # Sets {0, 10, 30, 35}, {90, 95}, {180} for a cosine of .93: neighbors 20 degrees apart are
        # alike (.940), and 35 is in the set of 0 though .82 alike. The pivot scores highest.
        ([0.3, 0.1, 0.9, 0.2, 0.0, 0.1, 0.5], (), 6, 21.6, {2: [0, 1, 3], 5: [4], 6: []}),
        ([0.9, 0.1, 0.9, 0.2, 0.0, 0.0, 0.5], (), 3, 21.6, {0: [1, 2, 3], 4: [5], 6: []}),
        # A cosine of .98 (11.5 degrees): {0, 10}, {30, 35}, {90, 95}, {180}.
        ([0.3, 0.1, 0.9, 0.2, 0.0, 0.1, 0.5], (), 4, 11.5, {0: [1], 2: [3], 5: [4], 6: []}),
        # One fewer fits: the most alike of the neighbors apart, 10 and 30 degrees, are joined.
        ([0.3, 0.1, 0.9, 0.2, 0.0, 0.1, 0.5], (), 3, 11.5, {2: [0, 1, 3], 5: [4], 6: []}),
        # What is protected stays by itself and parts what stands around it.
        ([0.3, 0.1, 0.9, 0.2, 0.0, 0.1, 0.5], (2,), 6, 21.6, {0: [1], 2: [], 3: [], 5: [4], 6: []}),
        # No room but for one set beside it: the others are forgotten.
        ([0.3, 0.1, 0.9, 0.2, 0.0, 0.1, 0.5], (2,), 2, 21.6, {2: [], 6: [3, 4, 5]}),
    ],
)
def test_kvmerger_sets_and_pivots_hand_values(scores, protected, most, degrees, sets) -> None:
    part, entries = Kvmerger(threshold=math.cos(math.radians(degrees))), a_plane()
    given = a_plan([range(most)], (7,))
    plan = part.compensate(given, entries, judged(scores, protected))
    pairs = list(zip(plan.folds.sources.tolist(), plan.folds.targets.tolist(), strict=True))
    assert plan.kept.tolist() == list(sets) and plan.lengths == (len(sets),)
    merged = {kept: [s for s, t in pairs if t == kept != s] for kept in sets}
    assert merged == sets


def test_kvmerger_weights_hand_values() -> None:
    # Distances 0, 1 and 1: sigma 2 / (3 sqrt 2), weights 1 and twice exp(-9/4) = .1054.
    entries = line([0, 1, 2], [4.0, 5.0, 3.0], [1] * 3)
    plan, scored = a_plan([[0]], (3,)), judged([1.0, 0.0, 0.0])
    folds = Kvmerger().compensate(plan, entries, scored).folds
    shares = dict(zip(folds.sources.tolist(), folds.key_weights.tolist(), strict=True))
    assert [shares[s] for s in range(3)] == pytest.approx([0.826, 0.087, 0.087], abs=5e-4)
    assert torch.equal(folds.key_weights, folds.value_weights)
    # Half as wide: exp(-9) = .0001.
    wide = Kvmerger(width=0.5).compensate(plan, entries, scored).folds
    assert float(wide.key_weights.max()) == pytest.approx(1 / (1 + 2 * math.exp(-9)))
    # Equal keys all weigh the same.
    same = replace(entries, keys=torch.full((3, 1), 4.0))
    assert numbers(Kvmerger().compensate(plan, same, scored), same)[1] == pytest.approx([40.0])


@pytest.mark.parametrize(
    "given, message",
    [
        ({"threshold": 1.1}, r"threshold must be in \[-1, 1\], got 1\.1"),
        ({"threshold": math.nan}, "threshold must be in"),
        ({"width": 0.0}, "width must be above 0, got 0.0"),
        ({"width": math.inf}, "width must be above 0"),
    ],
)
def test_kvmerger_parameters_out_of_range_are_refused(given, message) -> None:
    with pytest.raises(BadParameter, match=rf"kvmerger\.{message}"):
        Kvmerger(**given)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_kvmerger_sets_in_chunks_equal_unchunked(monkeypatch, rows) -> None:
    (entries, scored), plan = some([0, 1, 2]), a_plan(KEPT, HELD)
    whole = Kvmerger(threshold=-0.1).compensate(plan, entries, scored).folds
    monkeypatch.setattr(f"{Kvmerger.__module__}.ROWS", rows)
    pieces = Kvmerger(threshold=-0.1).compensate(plan, entries, scored).folds
    assert len(whole) and torch.equal(whole.sources, pieces.sources)
    torch.testing.assert_close(whole.key_weights, pieces.key_weights)
