"""LongCache's selection equals the loop: products without positions, votes, and spans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import RADIANS, a_layer
from index_recall import built
from larder.core import BadParameter, CacheError
from larder.recall import Positionless
from references import positionless as loop
from references.a2ats import turned
from references.lloyd import dot

LAYER = a_layer(kv_heads=2, group=2)


@pytest.mark.parametrize(("best", "span"), [(1, 1), (3, 5), (2, 8)])
@pytest.mark.parametrize("count", [3, 17, 60])
def test_index_equals_its_reference(best: int, span: int, count: int) -> None:
    part = Positionless(best=best, span=span)
    tier, index = built(part, LAYER, [(23, 31), (7, 0)], count)
    query, held = tier.queries(), tier.entries()
    index.observe_step(query, replace(held, positions=held.positions + 50))
    at = int(held.head_positions(0)[-1]) + 50
    rows, positions = [], [list(range(len(keys))) for keys in tier.keys]
    for h, row in enumerate(query.tolist()):
        keys = tier.keys[h // 2].tolist()
        raw = turned(row, -at, RADIANS)
        rows.append([dot(raw, turned(key, -n, RADIANS)) for n, key in enumerate(keys)])
    pages = index.find(query, held, count).pages.tolist()
    found = [[page for page in row if page >= 0] for row in pages]
    assert found == loop.chosen(rows, positions, best, span, count)


def test_ranked_positions_hand_values() -> None:
    """Of positions with a vote each the larger product comes first, but two votes come before."""
    rows = [[0.0] * 4 + [1.0] + [0.0] * 4 + [2.0], [0.0] * 4 + [1.0] + [0.0] * 5]
    positions = [list(range(10))]
    assert loop.ranked_positions(rows, positions, 1, 4)[:4] == [7, 8, 9, 2]
    rows[0][4] = 3.0
    assert loop.ranked_positions(rows, positions, 1, 4)[:8] == [2, 3, 4, 5, 7, 8, 9, 0]


def test_scores_do_not_depend_on_distance() -> None:
    """A query at another position finds the same entries."""
    tier, index = built(Positionless(), LAYER, [(40, 40)])
    query, held = tier.queries(), tier.entries()
    found = []
    for at in (45, 4000):
        stays = replace(held, positions=torch.full_like(held.positions, at))
        index.observe_step(query, stays)
        rotated = [turned(row, at, RADIANS) for row in query.tolist()]
        found.append(index.find(torch.tensor(rotated), held, 6).pages)
    assert torch.equal(*found)


def test_unknown_rotation_is_refused() -> None:
    with pytest.raises(CacheError, match="positionless cannot undo it"):
        Positionless().index(replace(LAYER, radians=None))


@pytest.mark.parametrize("name", ["best", "span"])
def test_parameters_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(BadParameter, match=f"positionless.{name} must be at least 1, got 0"):
        Positionless(**{name: 0})
