"""Scorers that turn queries or keys back, where a layer turns them to places of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from builders import RADIANS, a_layer, a_view
from larder.core import BadParameter, Observation, ScoreError
from larder.ops import rotate, rotate_per_head
from larder.policy import Expected, Leverage

HEADS = [[0, 1, 4, 5, 9, 10, 11], [2, 3, 8, 9, 10, 11]]
PARTS = (Expected(future=5, sinks=2), Leverage(sketch=9), Leverage(sketch=5, ridge=0.02))


def a_compact_view() -> Observation:
    """Keys turned to their order, queries behind them."""
    observation = a_view(a_layer(2, 2), HEADS, 3)
    positions = torch.zeros_like(observation.entries.positions)
    for head, length in enumerate(observation.entries.lengths):
        positions[observation.entries.rows(head)] = torch.arange(length, dtype=positions.dtype)
    entries = replace(observation.entries, rope_positions=positions)
    return replace(
        observation, entries=entries, rope_positions=torch.tensor([[4, 5, 6], [3, 4, 5]])
    )


def shifted(observation: Observation, by: int) -> Observation:
    """Observation moved by some positions in the text; sinks stay sinks."""
    radians, rows = torch.tensor(RADIANS), torch.full((len(observation.entries.keys),), by)
    keys = rotate(observation.entries.keys[None], rows, radians)[0]
    moved = observation.effective_rope_positions + by
    queries = rotate_per_head(observation.queries, torch.full_like(moved, by), radians)
    entries = replace(
        observation.entries,
        keys=keys,
        rope_positions=observation.entries.effective_rope_positions + by,
    )
    return replace(observation, entries=entries, queries=queries, rope_positions=moved)


@pytest.mark.parametrize("part", PARTS)
def test_scorer_of_a_compact_layer_equals_its_reference(loop_of, part) -> None:
    observation = a_compact_view()
    got = part.score(observation).split(observation.entries.lengths)
    for one, other in zip(got, loop_of(part).scores(part, observation), strict=True):
        assert one.tolist() == pytest.approx(other, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("by", [7, 3000])
def test_scores_depend_on_distances_only(part, by) -> None:
    for seen in (a_view(a_layer(2, 2), HEADS, 3), a_compact_view()):
        torch.testing.assert_close(
            part.score(shifted(seen, by)), part.score(seen), atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("part", PARTS)
def test_unknown_rotation_is_refused(part) -> None:
    observation = a_view(a_layer(2, 2, index=3), HEADS, 3)
    with pytest.raises(ScoreError, match="Layer 3 rotates its"):
        part.score(replace(observation, layer=replace(observation.layer, radians=None)))


@pytest.mark.parametrize("part", PARTS)
def test_layers_without_rotation_are_scored(loop_of, part) -> None:
    observation = a_view(a_layer(2, 2), HEADS, 3)
    still = replace(observation, layer=replace(observation.layer, radians=()))
    got = part.score(still).split(observation.entries.lengths)
    for one, other in zip(got, loop_of(part).scores(part, still), strict=True):
        assert one.tolist() == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_expected_attention_equals_a_monte_carlo_mean() -> None:
    """Against the mean exponential logit of many drawn queries, where the rotation is one."""
    observation = a_view(a_layer(1, 1), [list(range(9))], 6)
    still = replace(observation.layer, radians=(), scaling=0.1)
    observation = replace(observation, layer=still, queries=observation.queries / 2)
    part = Expected(sinks=0, epsilon=0.0)
    drawn = torch.distributions.MultivariateNormal(
        observation.queries[0].mean(0),
        torch.cov(observation.queries[0].T, correction=0) + 1e-6 * torch.eye(8),
    ).sample((200_000,))
    keys, values = observation.entries.head_keys(0), observation.entries.head_values(0)
    means = (drawn @ keys.T * 0.1).exp().mean(0)
    expected = means / means.sum() * values.norm(dim=-1)
    torch.testing.assert_close(part.score(observation), expected, rtol=0.03, atol=0.0)


def test_unique_key_has_leverage_near_one() -> None:
    observation = a_view(a_layer(1, 1), [list(range(40))], 3)
    still = replace(observation, layer=replace(observation.layer, radians=()))
    keys = torch.randn(len(still.entries.keys), 8)
    keys[:, 7] = 0.0
    keys[17, 7] = 3.0
    scores = Leverage(sketch=8).score(replace(still, entries=replace(still.entries, keys=keys)))
    assert scores.argmax() == 17 and scores[17] > 0.95
    assert float(scores.sum()) == pytest.approx(8, abs=0.2)  # the rank


def test_invalid_leverage_parameters_are_refused() -> None:
    with pytest.raises(BadParameter, match="leverage.sketch must be at least 1 dimension, got 0"):
        Leverage(sketch=0)
    with pytest.raises(BadParameter, match="leverage.ridge must be above 0, got 0.0"):
        Leverage(ridge=0.0)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"future": 0}, "expected.future must be at least 1 position, got 0"),
        ({"sinks": -1}, "expected.sinks must be 0 or more, got -1"),
        ({"epsilon": -0.1}, "expected.epsilon must be 0 or more, got -0.1"),
    ],
)
def test_invalid_expected_parameters_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        Expected(**wrong)
