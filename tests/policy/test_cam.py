"""CaM by numbers that were worked out by hand, and what its values promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_layer, a_plan, draw, layer_options
from larder.cache import RaggedLayer, merge_entries
from larder.core import BadParameter, Entries, LayerScores, Ledger, Phase, Plan
from larder.policy import Cam, Merge
from scalar_entries import judged, line, numbers

EXPECTED = Merge.EXPECTED


def looked_at(entries: Entries, weights: list[float], joined: list[float] | None = None) -> Entries:
    """Entries that the newest query gave these weights, and that as many values have joined."""
    newest = {
        "newest": torch.tensor(weights),
        "joined": torch.tensor(joined or [0.0] * len(weights)),
    }
    return replace(entries, columns={**entries.columns, **newest})


def settled(part: Cam, kept: list[int], entries: Entries, phase: Phase = Phase.DECODE) -> Plan:
    count = len(entries.keys)
    scored = replace(judged([0.0] * count), phase=phase)
    return part.compensate(a_plan([kept], (count,)), entries, scored)


def test_cam_hand_values() -> None:
    # 1 joins 2 and 4 with .2 / mean(.2, .8, .2) = .5, 3 joins 4 and 5 with .9 / .5 (clamped to 1),
    # and after 6 nothing follows.
    entries = line([0, 1, 2, 3, 4, 5, 6], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [1] * 7)
    entries = looked_at(entries, [9.0, 0.2, 0.2, 0.9, 0.8, 0.2, 0.4])
    plan = settled(Cam(window=2, merge=EXPECTED), [0, 2, 4, 5], entries)
    keys, values, counts = numbers(plan, entries)
    assert keys == [1.0, 3.0, 5.0, 6.0] and counts == [1.0] * 4
    assert values == pytest.approx([10.0, 30 + 5.0, 50 + 5.0 + 20.0, 60 + 20.0])
    assert plan.columns["joined"].tolist() == pytest.approx([0.0, 0.25, 0.25 + 0.5, 0.5])
    # Fewer than the window follow 3: all of it goes to these.
    plan = settled(Cam(window=9, merge=EXPECTED), [0, 2, 5], entries)
    assert numbers(plan, entries)[1] == pytest.approx([10.0, 30 + 10.0, 60 + 10.0 + 40.0 + 50.0])


def test_cam_drops_entries_during_prefill() -> None:
    entries = looked_at(line([0, 1, 2], [1.0, 2.0, 3.0], [1] * 3), [1.0, 1.0, 1.0])
    plan = settled(Cam(), [0, 2], entries, Phase.PREFILL)
    assert not len(plan.folds) and not plan.columns


def test_cam_preserves_the_weighted_sum() -> None:
    source = torch.Generator().manual_seed(6)
    values, weights = torch.randn(12, 8, generator=source), torch.rand(12, generator=source)
    weights[3] *= 0.1  # less than those that follow: its share is not clamped
    positions = torch.arange(12, dtype=torch.int32)
    entries = looked_at(Entries(values, values, positions, (0,), (12,)), weights.tolist())
    kept = [0, 1, 2, *range(4, 12)]
    merged, now = (
        merge_entries(settled(Cam(window=8, merge=EXPECTED), kept, entries), entries),
        values.clone(),
    )
    now[merged.targets] = merged.values
    torch.testing.assert_close(weights[kept] @ now[kept], weights @ values)


def test_cam_of_zero_weights_hand_values() -> None:
    entries = line([0, 1, 2], [1.0, 2.0, 3.0], [1] * 3)
    for weights, expected in ([0.0, 0.0, 0.0], 30.0), ([0.0, 0.5, 0.0], 50.0):
        held = looked_at(entries, weights)
        assert numbers(settled(Cam(), [0, 2], held), held)[1] == pytest.approx([10.0, expected])


def test_cam_divides_a_merged_value_by_its_count() -> None:
    entries = looked_at(line([0, 1, 2], [1.0, 2.0, 3.0], [1] * 3), [1.0] * 3, [0.0, 0.6, 0.1])
    plan = settled(Cam(), [0, 2], entries)
    assert numbers(plan, entries)[1] == pytest.approx([10.0, 30 + 20 / 1.6])
    assert plan.columns["joined"].tolist() == pytest.approx([0.0, 1.1])


def test_sampled_cam_equals_expected_cam_on_average() -> None:
    entries = looked_at(line([0, 41, 50], [1.0, 2.0, 3.0], [1] * 3), [0.0, 0.3, 1.0])
    drawn = [settled(Cam(seed=seed), [0, 2], entries) for seed in range(100)]
    joined = [numbers(one, entries)[1][1] for one in drawn]
    assert set(joined) == {30.0, 50.0}
    # Three standard deviations of 20 * .46 / 10.
    assert sum(joined) / 100 == pytest.approx(36.0, abs=2.8)
    again = settled(Cam(seed=3), [0, 2], entries)
    assert numbers(again, entries)[1][1] == joined[3]


def test_cam_samples_are_uniform_and_differ_between_heads() -> None:
    positions = torch.arange(0, 1000, dtype=torch.int32).repeat(2)
    columns = {"newest": torch.full((2000,), 0.25), "joined": torch.zeros(2000)}
    columns["newest"][999::1000] = 1.0
    ones = torch.ones(2000, 1)
    entries = Entries(ones, ones, positions, (0, 1000), (1000, 1000), columns)
    scored = LayerScores(
        torch.zeros(2000), torch.zeros(2000).bool(), (1000, 1000), phase=Phase.DECODE
    )
    plan = Cam().compensate(a_plan([[999], [999]], (1000, 1000)), entries, scored)
    joins = plan.folds.sources[plan.folds.sources != plan.folds.targets]
    assert abs(len(joins) - 500) < 60  # 3 standard deviations of 19
    heads = [set((joins[joins // 1000 == head] % 1000).tolist()) for head in range(2)]
    assert heads[0] != heads[1]


@pytest.mark.extended
@pytest.mark.parametrize("merge", Merge)
def test_cam_values_stay_bounded(merge: Merge) -> None:
    """Even attention and equal values: what joins is as large as can be."""
    layer, part, held = a_layer(1, 1), Cam(window=8, merge=merge), 24
    ledger = Ledger(columns=("joined", "newest"))
    store = RaggedLayer(layer, layer_options(ledger=ledger))
    for step in range(400):
        new = draw(layer, 1, step)
        store.append(new.keys, torch.ones_like(new.values), new.positions)
        store.write_columns({"newest": torch.ones(len(store.entries().keys))})
        if sum(store.lengths) > held:
            kept = [0, 1, *range(3, held + 1)]
            scored = replace(judged([0.0] * (held + 1)), phase=Phase.DECODE)
            store.apply(part.compensate(a_plan([kept], store.lengths), store.entries(), scored))
    assert float(store.entries().pack(store.entries().values).max()) <= 2.0001


@pytest.mark.parametrize("window", [0, -1])
def test_window_out_of_range_is_refused(window) -> None:
    with pytest.raises(BadParameter, match=r"cam\.window must be at least 1"):
        Cam(window=window)
