"""Eviction behind a decode step over pages: torch against the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from larder.core import ScoreError
from larder.ops import evict_lowest, page_eviction
from paged_evictions import StepSegments, step_segments
from references.ops.pages import after_step_eviction, entries_of


def after(own: StepSegments) -> list[list[dict[str, Any]]]:
    """Entries of each segment that stay, as dictionaries of their numbers."""
    lengths = torch.minimum(own.limits.lengths, own.limits.counts)
    pools = _pools(own)
    held = {name: entries_of(pool, own.table, lengths) for name, pool in pools.items()}
    return [
        [{name: rows[s][i].double().tolist() for name, rows in held.items()} for i in range(length)]
        for s, length in enumerate(lengths.tolist())
    ]


def _pools(own: StepSegments) -> dict[str, torch.Tensor]:
    keys, values, positions, (log_count, mass) = own.entries
    sides = {"keys": keys, "values": values, "positions": positions}
    return {**sides, "log_count": log_count, "mass": mass}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_merging", [False, True])
def test_eviction_equals_its_reference(seed, is_merging) -> None:
    own = step_segments(seed=seed)
    rates = own.merging.rates.tolist() if is_merging else [0.0] * len(own.table)
    first_pages = own.table[:, 0]
    thresholds = own.merging.thresholds[first_pages].tolist()
    limits = zip(*(each.tolist() for each in own.limits[1:]), strict=True)
    lengths = own.limits.lengths.tolist()
    given = own.table, lengths, list(limits), rates, thresholds, own.newest
    expected = after_step_eviction(_pools(own), *given)
    assert sum(map(len, expected)) == sum(lengths) - 5
    evict_lowest(own.entries, own.mass, own.table, own.limits, own.merging if is_merging else None)
    for found, wanted in zip(after(own), expected, strict=True):
        assert [row["positions"] for row in found] == [row["positions"] for row in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert one.keys() == other.keys()
            for name, numbers in one.items():
                assert numbers == pytest.approx(other[name], abs=1e-5), name
    found = own.merging.thresholds[first_pages].tolist()
    assert found == pytest.approx(thresholds, abs=1e-6, nan_ok=True)


def test_score_that_is_not_a_number_is_refused_and_changes_nothing() -> None:
    own = step_segments()
    own.mass[own.table[3, 0], 0] = torch.nan  # of a spared entry, which plans refuse as well
    before = own.clone()
    with pytest.raises(ScoreError, match="is NaN for 1 of 37 entries"):
        evict_lowest(own.entries, own.mass, own.table, own.limits, own.merging)
    pairs = zip(_pools(own).values(), _pools(before).values(), strict=True)
    assert all(torch.equal(one.nan_to_num(9), other.nan_to_num(9)) for one, other in pairs)


def test_scores_of_segments_from_which_nothing_goes_may_be_lost() -> None:
    own = step_segments()
    own.mass[own.table[4, 0], 0] = torch.nan
    evict_lowest(own.entries, own.mass, own.table, own.limits)
    assert own.mass[own.table[4, 0], 0].isnan()


@pytest.mark.parametrize("lost", [(0,), (0, 1), (0, 1, 2, 3), (1, 5, 11)])
def test_lost_scores_rank_below_all_but_spare_who_is_spared(lost, monkeypatch) -> None:
    own = step_segments()
    monkeypatch.setattr(page_eviction, "_check", lambda scores, is_ranked: None)  # as on a GPU
    pages, size = own.table[3].long(), own.mass.shape[1]
    for index in lost:
        own.mass[pages[index // size], index % size] = torch.nan
    first, stop = int(own.limits.firsts[3]), int(own.limits.stops[3])
    before = [int(row["positions"]) for row in _held(own, 12)]
    own.mass[pages[1], 3] = 0.001  # the lowest number
    evict_lowest(own.entries, own.mass, own.table, own.limits)
    [gone] = set(before) - {int(row["positions"]) for row in _held(own, 11)}
    evictable = [before[index] for index in lost if first <= before[index] < stop]
    assert gone == (evictable or [before[7]])[-1]


def _held(own: StepSegments, length: int) -> list[dict[str, Any]]:
    """Entries of the segment at index 3."""
    rows = entries_of(own.entries.positions, own.table[3:4], torch.tensor([length]))[0]
    return [{"positions": row} for row in rows]


def test_segment_is_independent_of_the_others() -> None:
    together = step_segments(seed=1)
    before = together.clone()
    evict_lowest(together.entries, together.mass, together.table, together.limits, together.merging)
    for segment in range(len(together.table)):
        alone, index = before.clone(), slice(segment, segment + 1)
        limits = type(alone.limits)(*(each[index] for each in alone.limits))
        merging = alone.merging._replace(
            **{n: getattr(alone.merging, n)[index] for n in ("rates", "newest")}
        )
        evict_lowest(alone.entries, alone.mass, alone.table[index], limits, merging)
        assert after(alone)[segment] == after(together)[segment]
