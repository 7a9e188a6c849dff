"""Chelsea's matching by numbers that were worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from builders import a_plan
from larder.core.errors import BadParameter
from larder.core.ledger import LOG_COUNT
from larder.core.observation import Entries
from larder.core.plan import Plan
from larder.policy.compensation.chelsea import Chelsea, Halves
from lines import judged, line, numbers

# Chunks of four, degrees: 0 stands in the first half of its chunk, 8 in the second, and so on.
DEGREES = [0.0, 8.0, 10.0, 50.0, 0.0, 5.0, 30.0, 180.0]


def turned(degrees: list[float]) -> Entries:
    """One head of keys of length 1 at these angles."""
    angles = torch.tensor(degrees).deg2rad()
    keys, count = torch.stack([angles.cos(), angles.sin()], 1), len(degrees)
    places, logs = torch.arange(count, dtype=torch.int32), torch.zeros(count)
    return Entries(keys, keys, places, (0,), (count,), {LOG_COUNT: logs})


def pairs(part: Chelsea, entries: Entries, kept: list[int]) -> dict[int, int]:
    """What each rejected entry joins."""
    plan = part.settle(a_plan([kept], entries.lengths), entries, judged([0.0] * len(entries.keys)))
    every = zip(plan.folds.sources.tolist(), plan.folds.targets.tolist(), strict=True)
    return {source: target for source, target in every if source != target}


@pytest.mark.parametrize(
    "part, kept, expected",
    [
        # 2 is most like 1 (2 degrees), 0 like 1 (8); 4 like 5, and 6 (25 from 5, 150 from 7) too.
        (Chelsea(4), [1, 3, 5, 7], {0: 1, 2: 1, 4: 5, 6: 5}),
        # The other half of what is kept: 1 goes to 2 (2), 0 has only 3; 4 has 7, 5 goes to 6.
        (Chelsea(4), [2, 3, 6, 7], {0: 3, 1: 2, 4: 7, 5: 6}),
        # The whole chunk: 0 goes to 2 (10 degrees) and 4 to 6 (30).
        (Chelsea(4, halves=Halves.EVERY), [2, 3, 6, 7], {0: 2, 1: 2, 4: 6, 5: 6}),
        # Half of the matches: 2 (2 degrees) and 4 (5) before 0 (8) and 6 (25).
        (Chelsea(4, merged=0.5), [1, 3, 5, 7], {2: 1, 4: 5}),
        # A match each: at least one is merged.
        (Chelsea(4, merged=0.01), [1, 3, 5, 7], {2: 1}),
        # Nothing of the other half is kept in the first chunk, nothing at all in the second.
        (Chelsea(4), [0, 2], {1: 2, 3: 2}),
        (Chelsea(4), [1], {0: 1, 2: 1}),
        (Chelsea(4, halves=Halves.EVERY), [1], {0: 1, 2: 1, 3: 1}),
        # One chunk: 0 finds 5 degrees in the second four, 6 finds 8 in the first.
        (Chelsea(8), [1, 3, 7], {0: 1, 2: 1, 4: 1, 6: 3}),
        (Chelsea(8), [3, 5, 7], {0: 5, 2: 5, 4: 5, 6: 3}),
    ],
)
def test_matches_by_hand(part, kept, expected) -> None:
    assert pairs(part, turned(DEGREES), kept) == expected


def test_an_odd_chunk_is_halved_anew() -> None:
    # Chunks {0, 1, 2} and {3, 4, 5}: 3 begins the first half of its chunk, as 0 does.
    entries = turned([0.0, 40.0, 1.0, 0.0, 40.0, 1.0])
    assert pairs(Chelsea(3), entries, [1, 2, 4, 5]) == {0: 1, 3: 4}


def test_a_chunk_ends_with_its_head() -> None:
    # 0 is rejected, and what is most like it is the first entry of the next head.
    one = turned([0.0, 90.0, 80.0, 0.0, 0.0, 0.0])
    entries = replace(one, starts=(0, 3), lengths=(3, 3))
    plan = Chelsea(4).settle(a_plan([[1, 2], [0, 1, 2]], (3, 3)), entries, judged([0.0] * 6))
    assert plan.folds.targets.unique().tolist() == [1]


def test_counts_by_hand() -> None:
    # (4 * 1 + 1 * 6) / 5 and (2 * 3 + 9) / 3; all keys point the same way.
    entries = line([0, 1, 2, 3], [1.0, 6.0, 3.0, 9.0], [4, 1, 2, 1])
    plan = Chelsea(2).settle(a_plan([[0, 3]], (4,)), entries, judged([0.0] * 4))
    keys, values, counts = numbers(plan, entries)
    assert keys == pytest.approx([2.0, 5.0]) and counts == pytest.approx([5, 3])
    assert values == pytest.approx([20.0, 50.0])


@pytest.mark.parametrize("share, merged", [(0.28, 7), (0.7, 18), (1.0, 25)])
def test_a_share_is_not_one_more_than_itself(share, merged) -> None:
    entries = turned([float(place) for place in range(50)])  # .28 * 25 is a little above 7
    assert len(pairs(Chelsea(50, share), entries, list(range(1, 50, 2)))) == merged


def test_matches_sought_a_few_at_a_time_are_the_same(monkeypatch) -> None:
    def settled() -> Plan:
        entries = turned(DEGREES)
        entries = replace(entries, values=entries.values.flip(0))
        return Chelsea(4).settle(a_plan([[1, 3, 5, 7]], (8,)), entries, judged([0.0] * 8))

    whole = settled()
    monkeypatch.setattr(f"{Chelsea.__module__}.ROWS", 4)
    assert torch.equal(whole.folds.targets, settled().folds.targets)
    assert torch.equal(whole.folds.sources, settled().folds.sources)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"chunk": 1}, "chunk must be at least 2, got 1"),
        ({"merged": 0.0}, r"merged must be in \(0, 1\], got 0\.0"),
        ({"merged": 1.5}, "merged must be in"),
        ({"merged": math.nan}, "merged must be in"),
    ],
)
def test_a_matching_out_of_range_is_refused(given, said) -> None:
    with pytest.raises(BadParameter, match=rf"chelsea\.{said}"):
        Chelsea(**given)
