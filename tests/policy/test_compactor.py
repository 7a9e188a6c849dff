"""Scores of Compactor, its first and last tokens left out, as in the released code, or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_layer, a_view
from larder import Policy
from larder.core import BadParameter, Observation
from larder.policy import Compactor, CompactorEnds, NonCausal
from references import compactor

LEFT_OUT = Compactor(sketch=5, chunk=3, sinks=2, recent=1, tokens=4, ends=CompactorEnds.LEFT_OUT)


def scored(part: Compactor, observation: Observation) -> list[list[float]]:
    scores = part.score(observation).split(observation.entries.lengths)
    return [head.tolist() for head in scores]


@settings(max_examples=30, deadline=None)
@given(
    heads=st.lists(st.sets(st.integers(0, 20), max_size=12), min_size=1, max_size=3),
    sinks=st.integers(0, 4),
    recent=st.integers(0, 4),
    seed=st.integers(0, 5),
    ends=st.sampled_from(CompactorEnds),
)
def test_scores_equal_a_loop_over_the_tokens_between(
    heads: list[set[int]], sinks: int, recent: int, seed: int, ends: CompactorEnds
) -> None:
    positions = [[*sorted(head), 21, 22, 23, 24] for head in heads]
    observation = a_view(a_layer(len(heads), 2, index=1), positions, 4, seed)
    part = replace(LEFT_OUT, sinks=sinks, recent=recent, ends=ends)
    expected = compactor.scores(part, observation)
    for one, other in zip(scored(part, observation), expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4, rel=1e-4)


def test_first_and_last_tokens_change_no_score_of_the_others() -> None:
    observation = a_view(a_layer(2, 2, index=1), [list(range(12))] * 2, 12)
    keys = observation.entries.keys.clone()
    ends = (observation.entries.positions < 2) | (observation.entries.positions == 11)
    keys[ends] *= 7
    changed = replace(observation, entries=replace(observation.entries, keys=keys))
    assert torch.equal(LEFT_OUT.score(observation), LEFT_OUT.score(changed))
    among = replace(LEFT_OUT, ends=CompactorEnds.AMONG)
    assert not torch.allclose(among.score(observation), among.score(changed))


def test_without_protected_tokens_both_ways_are_the_same() -> None:
    observation = a_view(a_layer(2, 2, index=1), [list(range(12))] * 2, 12)
    part = replace(LEFT_OUT, sinks=0, recent=0)
    among = replace(part, ends=CompactorEnds.AMONG)
    assert torch.equal(part.score(observation), among.score(observation))


def test_ends_are_left_out_unless_told() -> None:
    assert Compactor().ends is CompactorEnds.LEFT_OUT
    assert 'ends="left_out"' in str(Policy.parse("compactor"))


def test_chunks_begin_at_no_negative_position() -> None:
    with pytest.raises(BadParameter, match="first"):
        NonCausal(first=-1)
