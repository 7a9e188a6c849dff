"""Pages: torch against the loop, and Triton's kernels against torch by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from larder.ops import (
    GroupReduction,
    add_column_mass,
    append_rows,
    compact_pages,
    gather_pages,
    reference_paged_attention,
)
from paged_segments import PagedSegments, kept_indices, padded_places, some_segments
from references.ops.pages import after_eviction, column_mass, entries_of

LENGTHS = (9, 0, 4, 1, 12)
TESTS = Path(__file__).parent.parent


@pytest.fixture
def segments() -> PagedSegments:
    return some_segments(LENGTHS, page_tokens=4, queries=(2, 3))


def test_appended_rows_are_at_their_slots() -> None:
    pool = torch.zeros(3, 2, 4)
    append_rows(pool, torch.tensor([5, 2]), torch.tensor([[1.0] * 4, [2.0] * 4]))
    assert pool[2, 1].tolist() == [1.0] * 4
    assert pool[1, 0].tolist() == [2.0] * 4
    assert pool.sum() == 12


def test_gathered_entries_equal_the_reference(segments) -> None:
    got = gather_pages(segments.keys, *segments.layout, segments.starts, sum(LENGTHS))
    rows = [row for own in entries_of(segments.keys, *segments.layout) for row in own]
    assert torch.equal(got, torch.stack(rows))


@pytest.mark.parametrize("kept", [1.0, 0.6, 0.0])
def test_eviction_equals_its_reference(segments, kept) -> None:
    positions = kept_indices(LENGTHS, kept)
    expected = after_eviction(segments.keys, *segments.layout, positions)
    padded, counts = padded_places(positions)
    table = segments.tables.table
    moved = segments.keys.clone()
    compact_pages(moved, table, table, padded, counts)
    for rows, own in zip(entries_of(moved, table, counts), expected, strict=True):
        assert len(rows) == len(own)
        assert all(torch.equal(a, b) for a, b in zip(rows, own, strict=True))


def test_eviction_moves_into_other_pages(segments) -> None:
    positions = [[0, 8], [], [3], [], [5]]
    expected = after_eviction(segments.keys, *segments.layout, positions)
    fresh = torch.tensor([[len(segments.keys) + n] for n in range(5)], dtype=torch.int32)
    pool = torch.cat([segments.keys, torch.zeros(5, 4, 8)])
    padded, counts = padded_places(positions)
    compact_pages(pool, segments.tables.table, fresh, padded, counts)
    rows = entries_of(pool, fresh, counts)
    assert [[r.tolist() for r in own] for own in rows] == [
        [r.tolist() for r in own] for own in expected
    ]


@pytest.mark.parametrize("reduction", GroupReduction)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("is_biased", [False, True])
def test_column_mass_equals_its_reference(segments, reduction, softcap, is_biased) -> None:
    bias = segments.bias if is_biased else None
    stored = segments.keys, segments.values, segments.tables, segments.scaling
    _, lse = reference_paged_attention(segments.queries, *stored, bias, softcap)
    columns = torch.full(segments.keys.shape[:2], 0.25)
    sizes = segments.scaling, reduction, bias, softcap
    add_column_mass(columns, segments.queries, segments.keys, *segments.layout, lse, *sizes)
    expected = column_mass(
        *(segments.queries, segments.keys, *segments.layout, segments.scaling),
        *(reduction.value, bias, softcap),
    )
    got = entries_of(columns, *segments.layout)
    for own, masses in zip(got, expected, strict=True):
        expected_masses = torch.tensor([0.25 + mass for mass in masses])
        torch.testing.assert_close(torch.tensor(own), expected_masses)  # float32, as columns are


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_equal_torch() -> None:
    """In a process of its own: Triton reads the environment when it is imported."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "interpreted_page_kernels.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kinds = ["append", "gather", "compact", "mass", "attention"]
    kinds += ["eviction", "launches", "layers", "noticed"]
    assert done.stdout.split() == kinds
