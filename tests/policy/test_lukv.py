"""Head budgets by curves of utility: numbers worked out by hand, and the loop on other curves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from larder.core import LayerScores, Phase
from larder.policy import CURVE_POINTS, LUKV, concave_steps, greedy_shares
from references import lukv as loop

HEIGHTS = st.lists(st.integers(0, 20), min_size=4, max_size=4)
CURVES = st.lists(HEIGHTS.map(lambda ups: [sum(ups[: i + 1]) / 4 for i in range(4)]), min_size=1)


def test_concave_hull_skips_points_below_it() -> None:
    # 0, .1, .6, .7, .8 at quarters: from 0 straight to .6, then .1 for each quarter.
    steps = concave_steps([0.1, 0.6, 0.7, 0.8])
    assert [width for _, width in steps] == [0.5, 0.5]
    assert [slope for slope, _ in steps] == pytest.approx([1.2, 0.4])


def test_greedy_shares_follow_the_steepest_slope() -> None:
    # Head 0 rises by 2.4 per share up to a quarter, then .4; head 1 by 1 all the way.
    curves = [[0.6, 0.7, 0.8, 0.9], [0.25, 0.5, 0.75, 1.0]]
    assert greedy_shares(curves, 0.2) == pytest.approx([0.2, 0.0])
    assert greedy_shares(curves, 0.75) == pytest.approx([0.25, 0.5])
    assert greedy_shares(curves, 1.5) == pytest.approx([0.5, 1.0])
    assert greedy_shares(curves, 2.0) == pytest.approx([1.0, 1.0])


@given(curves=CURVES, part=st.floats(0, 1))
def test_greedy_shares_equal_their_reference(curves, part) -> None:
    total = part * len(curves)
    got = greedy_shares(curves, total)
    assert sum(got) == pytest.approx(total, abs=1e-9)
    gained = sum(_hull(curve, share) for curve, share in zip(curves, got, strict=True))
    looped = loop.greedy(curves, total)
    assert gained == pytest.approx(
        sum(_hull(curve, share) for curve, share in zip(curves, looped, strict=True))
    )
    assert greedy_shares(curves[::-1], total)[::-1] == pytest.approx(got)


def _hull(curve: list[float], share: float) -> float:
    """Height of the concave hull at a share."""
    height = 0.0
    for slope, width in concave_steps(curve):
        height += slope * min(width, max(share, 0.0))
        share -= width
    return height


SHARP = [0.9] + [0.9 + 0.1 * at / 15 for at in range(1, 16)]
STRAIGHT = [at / 16 for at in range(1, 17)]


def judged(measure: list[float], phase: Phase = Phase.PREFILL) -> LayerScores:
    scores = torch.arange(128.0).flip(0)
    protected = torch.zeros(128, dtype=torch.bool)
    protected[0] = protected[64] = True
    return LayerScores(scores, protected, (64, 64), tuple(measure), phase=phase)


def test_heads_of_a_layer_share_by_their_curves() -> None:
    # 18 beside the protected ones of 126: the sharp head gets a sixteenth of its 63, 3.94.
    part = LUKV()
    plan = part.choose({0: judged([*SHARP, *STRAIGHT])}, {0: 10})[0]
    assert plan.lengths == (1 + 4, 1 + 14)
    alike = part.choose({0: judged([*SHARP, *SHARP])}, {0: 10})[0]
    assert alike.lengths == (10, 10)
    later = part.choose({0: judged([*SHARP, *STRAIGHT], Phase.DECODE)}, {0: 10})[0]
    assert later.lengths == (10, 10)
    every = part.choose({0: judged([*SHARP, *STRAIGHT])}, {0: 64})[0]
    assert every.lengths == (64, 64)
    none = part.choose({0: replace(judged(SHARP), scores=torch.zeros(128))}, {0: 1})[0]
    assert none.kept.tolist() == [0, 64]


def test_layers_get_the_sum_of_their_heads_shares() -> None:
    # Two layers of one head, a half of each on average: 1/16 at .9 x 16, then all that rises by 1.
    calibration = {"utility": (*SHARP, *STRAIGHT)}
    assert LUKV().layer_tokens(160, 2, 0, 320, calibration) == (20, 300)
    assert LUKV().layer_tokens(320, 2, 0, 320, calibration) == (320, 320)
    assert len(STRAIGHT) == CURVE_POINTS
