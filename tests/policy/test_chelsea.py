"""Chelsea's matching by numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_plan
from larder import Policy
from larder.cache import merge_entries
from larder.core import LOG_COUNT, BadParameter, Entries, Plan
from larder.policy import Chelsea
from scalar_entries import judged, line, numbers

# Chunks of four, degrees: 0 stands in the first half of its chunk, 8 in the second, and so on.
DEGREES = [0.0, 8.0, 10.0, 50.0, 0.0, 5.0, 30.0, 180.0]


def turned(degrees: list[float]) -> Entries:
    """One head of keys of length 1 at these angles."""
    angles = torch.tensor(degrees).deg2rad()
    keys, count = torch.stack([angles.cos(), angles.sin()], 1), len(degrees)
    positions, logs = torch.arange(count, dtype=torch.int32), torch.zeros(count)
    return Entries(keys, keys, positions, (0,), (count,), {LOG_COUNT: logs})


def settled(part: Chelsea, entries: Entries, kept: list[int], spared: tuple[int, ...] = ()) -> Plan:
    scored = judged([0.0] * len(entries.keys), spared)
    return part.compensate(a_plan([kept], entries.lengths), entries, scored)


def pairs(plan: Plan) -> dict[int, int]:
    """Target of each merged entry."""
    every = zip(plan.folds.sources.tolist(), plan.folds.targets.tolist(), strict=True)
    return {source: target for source, target in every if source != target}


@pytest.mark.parametrize(
    "part, tokens, expected",
    [
        # First halves 0, 2 | 4, 6. 2 is most like 1 (2 degrees), 4 like 5 (5), 0 like 1 (8), then
        # 6, 25 from 5.
        (Chelsea(4), 8, {}),
        (Chelsea(4), 7, {2: 1}),
        (Chelsea(4), 6, {2: 1, 4: 5}),
        (Chelsea(4), 5, {0: 1, 2: 1, 4: 5}),
        (Chelsea(4), 4, {0: 1, 2: 1, 4: 5, 6: 5}),
        # Second round, one chunk: 1 (about 6 degrees), 3 (50), 5 (12), 7 (180). 5 is nearer to 3.
        (Chelsea(4), 3, {0: 1, 2: 1, 4: 3, 5: 3, 6: 3}),
        (Chelsea(4), 1, dict.fromkeys(range(7), 7)),
        # One chunk: 0 finds 5 degrees, 4 too, 2 finds 8, 6 finds 50.
        (Chelsea(8), 6, {0: 5, 2: 1}),
    ],
)
def test_matching_hand_values(part, tokens, expected) -> None:
    plan = settled(part, turned(DEGREES), list(range(tokens)))
    assert pairs(plan) == expected and plan.lengths == (tokens,)
    assert plan.kept.tolist() == [s for s in range(8) if s not in expected]


def test_matching_decides_evictions_whatever_the_plan_keeps() -> None:
    degrees = [0.0, 90.0, 200.0, 201.0]  # of four, the last two are nearly one
    for kept in ([0, 1, 2], [1, 2, 3], [0, 2, 3]):
        plan = settled(Chelsea(4), turned(degrees), kept)
        assert plan.kept.tolist() == [0, 1, 3] and pairs(plan) == {2: 3}


def test_identical_pairs_merge_first() -> None:
    degrees = [10.0, 40.0, 80.0, 80.0, 120.0, 121.0, 170.0, 170.0]
    entries = turned(degrees)
    plan = settled(Chelsea(8), entries, list(range(6)))
    assert pairs(plan) == {2: 3, 6: 7}
    merged = merge_entries(plan, entries)
    torch.testing.assert_close(merged.keys, entries.keys[[3, 7]])  # the mean of a key and itself


def test_protected_entries_are_not_matched() -> None:
    entries = turned([0.0, 0.0, 90.0, 91.0, 180.0, 180.0])
    plan = settled(Chelsea(6), entries, [0, 1, 2, 4, 5], spared=(0, 1, 4, 5))
    assert plan.kept.tolist() == [0, 1, 3, 4, 5] and pairs(plan) == {2: 3}
    # No room beside it: the rest is forgotten.
    plan = settled(Chelsea(6), entries, [0, 1, 4, 5], spared=(0, 1, 4, 5))
    assert plan.kept.tolist() == [0, 1, 4, 5] and not len(plan.folds)


def test_chunks_are_formed_again_from_remaining_entries() -> None:
    # Chunks {0, 1}, {2, 3}: both merge, and of what is left 1 and 3 make a chunk.
    plan = settled(Chelsea(2), turned([0.0, 1.0, 90.0, 91.0]), [0])
    assert plan.kept.tolist() == [3] and pairs(plan) == {0: 3, 1: 3, 2: 3}


def test_chunks_do_not_cross_heads() -> None:
    # What is most like the first entry is the first one of the next head.
    one = turned([0.0, 90.0, 80.0, 0.0, 0.0, 0.0])
    entries = replace(one, starts=(0, 3), lengths=(3, 3))
    plan = Chelsea(4).compensate(a_plan([[1, 2], [0, 1, 2]], (3, 3)), entries, judged([0.0] * 6))
    assert plan.kept.tolist() == [0, 1, 3, 4, 5] and pairs(plan) == {2: 1}


def test_merged_counts_hand_values() -> None:
    # (4 * 1 + 1 * 6) / 5 and (2 * 3 + 9) / 3; all keys point the same way.
    entries = line([0, 1, 2, 3], [1.0, 6.0, 3.0, 9.0], [4, 1, 2, 1])
    keys, values, counts = numbers(settled(Chelsea(2), entries, [0, 3]), entries)
    assert keys == pytest.approx([2.0, 5.0]) and counts == pytest.approx([5, 3])
    assert values == pytest.approx([20.0, 50.0])
    # In one go all four: the mean of all tokens.
    keys, _, counts = numbers(settled(Chelsea(2), entries, [0]), entries)
    assert keys == pytest.approx([25 / 8]) and counts == pytest.approx([8])


def test_matching_in_chunks_of_rows_equals_unchunked(monkeypatch) -> None:
    whole = settled(Chelsea(4), turned(DEGREES), [0, 1, 2])
    monkeypatch.setattr(f"{Chelsea.__module__}.ROWS", 4)
    assert pairs(settled(Chelsea(4), turned(DEGREES), [0, 1, 2])) == pairs(whole)


def test_preset_uses_no_attention_and_exceeds_its_budget_by_less_than_a_chunk() -> None:
    preset = Policy.parse("chelsea")
    assert preset.scorer.default_reduction() is None
    assert preset.timing.excess() == preset.compensation.chunk - 1


def test_chunk_out_of_range_is_refused() -> None:
    with pytest.raises(BadParameter, match=r"chelsea\.chunk must be at least 2, got 1"):
        Chelsea(chunk=1)
