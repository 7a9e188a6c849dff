"""Caches in which a part of what a coded cache lost is undone."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from builders import a_layer, a_spec
from larder.cache import SequenceCache
from larder.core import ModelSpec, Plan

ROOT = Path(__file__).parents[2]
TOKENS = 6
KEPT = [[0, 2, 5], [1, 2]]  # positions of each kv head
NEEDLE = torch.tensor([0, 0, 1, 1, 0, 0], dtype=torch.bool)


@pytest.fixture(autouse=True)
def among_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def filled(spec: ModelSpec, number: float) -> SequenceCache:
    """Full cache of one number as keys, and of its negative as values."""
    cache = SequenceCache(spec, "ragged")
    for store in cache.layers:
        keys = torch.full((len(KEPT), TOKENS, store.layer.head_dim), number, dtype=spec.dtype)
        store.append(keys, -keys, torch.arange(TOKENS))
    cache.advance(TOKENS)
    return cache


@pytest.mark.parametrize(
    ("part", "positions", "keys", "values"),
    [
        ("evicted, exact", KEPT, [[1, 1, 1], [1, 1]], [[1, 1, 1], [1, 1]]),
        ("keys coded", KEPT, [[3, 3, 3], [3, 3]], [[1, 1, 1], [1, 1]]),
        ("values coded", KEPT, [[1, 1, 1], [1, 1]], [[3, 3, 3], [3, 3]]),
        (
            "coded, the rest exact",
            [[0, 1, 2, 3, 4, 5]] * 2,
            *[[[3, 1, 3, 1, 1, 3], [1, 3, 3, 1, 1, 1]]] * 2,
        ),
        ("needles exact where kept", KEPT, *[[[3, 1, 3], [3, 1]]] * 2),
        ("needles kept, exact", [[0, 2, 3, 5], [1, 2, 3]], *[[[3, 1, 1, 3], [3, 1, 1]]] * 2),
    ],
)
def test_part_has_coded_numbers_and_entries_as_it_says(
    part: str,
    positions: list[list[int]],
    keys: list[list[int]],
    values: list[list[int]],
) -> None:
    spec = a_spec(a_layer(), a_layer(index=1))
    benchmark = import_module("needle_parts")
    full, coded = filled(spec, 1.0), filled(spec, 3.0)
    kept = torch.tensor(
        [head * TOKENS + position for head, row in enumerate(KEPT) for position in row]
    )
    for store in coded.layers:
        store.apply(Plan(kept, tuple(map(len, KEPT))))
    mixed = benchmark.mixed(full, coded, benchmark.PARTS[part], NEEDLE)
    assert mixed.next_position == TOKENS
    for index in range(len(mixed.layers)):
        found = mixed.entries(index)
        for head in range(len(KEPT)):
            assert found.head_positions(head).tolist() == positions[head]
            assert found.head_keys(head)[:, 0].tolist() == keys[head]
            assert found.head_values(head)[:, 0].tolist() == [-x for x in values[head]]
