"""Shares of a chunk to compute again, by numbers that were worked out by hand."""

from __future__ import annotations

import pytest

from larder.cache import ChunkProfile

ONE, TWO, THREE, FOUR = (1,), (2,), (3,), (4,)


def a_profile(masses: tuple[float, ...], intra: float, count: int = 10) -> ChunkProfile:
    before = (ONE, TWO, THREE, FOUR)[: len(masses)]
    tokens = tuple(float((7 * token) % count) for token in range(count))
    return ChunkProfile(before, (masses,), (intra,), tokens)


def test_impact_is_the_sigmoid_of_outer_over_inner_attention_per_pair() -> None:
    # .2 / (10 x 1) = .02 beside 4 / 10^2 = .04: sigmoid(.5).
    assert a_profile((0.2,), 4.0).impact() == pytest.approx(0.6225, abs=1e-4)
    two = ChunkProfile((ONE,), ((0.1,), (0.3,)), (2.0, 6.0), (0.0,) * 10)
    assert two.impact() == pytest.approx(0.6225, abs=1e-4)  # means over layers
    assert a_profile((), 4.0).impact() == 0.5


def test_overlap_is_the_mass_of_repeated_chunks_and_falls_with_swapped_pairs() -> None:
    # .8 of the mass stands before it again; of three of its chunks one pair is swapped.
    profile = a_profile((0.3, 0.3, 0.2, 0.2), 4.0)
    assert profile.overlap((TWO, ONE, THREE)) == pytest.approx(0.8 * 2 / 3)
    assert profile.overlap((ONE, TWO, THREE, FOUR)) == 1
    assert profile.overlap((THREE,)) == pytest.approx(0.2)
    assert profile.overlap(()) == profile.overlap(((9,),)) == 0
    assert a_profile((), 4.0).overlap(()) == 1 and a_profile((), 4.0).overlap((ONE,)) == 0


def test_recompute_share_follows_from_impact_and_overlap() -> None:
    # CCI .622, overlap .533: .290, of 100 tokens 30.
    masses = (0.6, 0.6, 0.4, 0.4)  # 2 / (100 x 1) = .02
    profile = a_profile(masses, 400.0, 100)
    share = profile.share((TWO, ONE, THREE), 1.0)
    assert share == pytest.approx(0.2905, abs=1e-3)
    assert profile.share((TWO, ONE, THREE), 9.0) == 1
    assert profile.share((ONE, TWO, THREE, FOUR), 1.0) == 0


def test_most_outward_selects_tokens_with_most_outer_attention() -> None:
    profile = ChunkProfile((ONE,), ((1.0,),), (1.0,), (0.1, 0.5, 0.5, 0.2))
    assert profile.most_outward(2) == [1, 2] and profile.most_outward(3) == [1, 2, 3]
    assert profile.most_outward(0) == []
