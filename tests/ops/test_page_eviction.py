"""Eviction behind a decode step over pages: torch against the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from larder.ops import evict_lowest
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
