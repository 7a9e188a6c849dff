"""ShotKV's whole examples, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_layer, a_view
from larder import Policy
from larder.core import BadParameter, LayerScores, Phase
from larder.policy import Entire, Shot


def judged(shots: list[tuple[int, float]], protected: tuple[int, ...] = ()) -> LayerScores:
    """One head of shots of so many tokens with these scores."""
    scores = torch.cat([torch.full((size,), score) for size, score in shots])
    marks = torch.zeros(len(scores), dtype=torch.bool)
    marks[list(protected)] = True
    return LayerScores(scores, marks, (len(scores),))


def kept(scored: LayerScores, tokens: int) -> list[int]:
    return Entire().choose({0: scored}, {0: tokens})[0].kept.tolist()


def test_whole_shots_are_kept_and_the_remainder_unused() -> None:
    """Shots of 40, 30 and 50 tokens with .3, .2 and .1: of 80, the first two take 70."""
    assert kept(judged([(40, 0.3), (30, 0.2), (50, 0.1)]), 80) == list(range(70))


def test_shot_that_does_not_fit_is_skipped() -> None:
    assert kept(judged([(40, 0.2), (50, 0.3), (20, 0.1)]), 75) == list(range(40, 110))
    assert kept(judged([(40, 0.3), (50, 0.2), (20, 0.1)]), 65) == [*range(40), *range(90, 110)]


def test_protected_tokens_take_precedence_over_shots() -> None:
    assert kept(judged([(4, 0.3), (3, 0.2)], protected=(5,)), 5) == [0, 1, 2, 3, 5]
    assert kept(judged([(4, 0.3), (3, 0.2)], protected=(5,)), 2) == [4, 5]


def test_generated_tokens_are_scored_individually() -> None:
    observation = a_view(a_layer(1, 1), [range(6)], 3)
    scores = torch.arange(6.0)
    assert Shot().pool(scores, observation).tolist() == [1.0, 1.0, 1.0, 4.0, 4.0, 4.0]
    assert torch.equal(Shot().pool(scores, replace(observation, phase=Phase.DECODE)), scores)


def test_example_beyond_the_budget_is_scored_by_token() -> None:
    """Examples end at positions that 3 divides; of a head's 5, 3 and 2 entries belong together."""
    observation = a_view(a_layer(2, 1), [range(5), [0, 1, 2, 3]], 3)
    scores = torch.tensor([5.0, 1.0, 3.0, 8.0, 2.0, 1.0, 2.0, 6.0, 4.0])
    assert Shot().pool(scores, observation).tolist() == [3.0] * 3 + [5.0] * 2 + [3.0] * 3 + [4.0]
    pooled = Shot(longest=2).pool(scores, observation).tolist()
    assert pooled == [5.0, 1.0, 3.0, 5.0, 5.0, 1.0, 2.0, 6.0, 4.0]
    assert Shot(longest=3).pool(scores, observation).equal(Shot().pool(scores, observation))
    assert Shot().with_budget(7) == Shot(longest=7) and Shot(longest=2).with_budget(7).longest == 2


def test_longest_shot_of_the_preset_is_its_budget() -> None:
    policy = Policy.parse("shotkv").with_sizes(100, None)
    assert policy.planner.unit == Shot(layers=1000, longest=100)


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(BadParameter, match="shot.longest must be at least 1 token, got 0"):
        Shot(longest=0)
    with pytest.raises(BadParameter, match="shot.layers must be at least 1, got 0"):
        Shot(layers=0)
