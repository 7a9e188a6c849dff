"""An explanation that contradicts itself is refused with what is wrong."""

from dataclasses import replace

import pytest

from larder.core import BadParameter
from larder.explain import Explanation, PageAnswer, PageEpisode, PageMessage


def test_heads_are_counted_from_the_lengths(small: Explanation) -> None:
    assert (small.heads_per_layer, small.heads_total) == ((2, 2), 4)


def test_layers_may_have_different_heads(small: Explanation) -> None:
    episode = PageEpisode("uneven", (5,) + (0,) * 9, ((1, 1, 1, 1), (1,)))
    uneven = replace(small, episodes=(episode,), answers=())
    assert (uneven.heads_per_layer, uneven.heads_total) == ((4, 1), 5)


def test_episode_is_needed(small: Explanation) -> None:
    with pytest.raises(BadParameter, match="at least one episode, got none"):
        replace(small, episodes=(), answers=())


def test_every_token_needs_a_count(small: Explanation) -> None:
    short = replace(small.episodes[1], kept_heads=(1, 2), kept_by_layer=())
    with pytest.raises(BadParameter, match="each of the 10 tokens in messages, got 2 in episode 1"):
        replace(small, episodes=(small.episodes[0], short))


def test_episodes_share_layers_and_heads(small: Explanation) -> None:
    other = replace(small.episodes[1], kept_lengths=((9, 9, 9, 9),), kept_by_layer=())
    with pytest.raises(BadParameter, match="unlike episode 1"):
        replace(small, episodes=(small.episodes[0], other))


@pytest.mark.parametrize("count", [-1, 5])
def test_counts_stay_within_the_heads(count: int) -> None:
    with pytest.raises(BadParameter, match=r"must lie in \[0, 4\]"):
        PageEpisode("odd", (0, count, 1), ((1, 1), (1, 1)))


@pytest.mark.parametrize("rows", [((1, 1),), ((1,), (0,)), ((1, 0), (0, 1)), ((2, 2), (-1, 0))])
def test_layers_sum_to_the_counts(rows: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(BadParameter, match="kept_by_layer"):
        PageEpisode("odd", (1, 2), ((1, 1), (1, 1)), kept_by_layer=rows)


@pytest.mark.parametrize("episode", [-1, 2])
def test_answers_name_an_episode(small: Explanation, episode: int) -> None:
    with pytest.raises(BadParameter, match=r"PageAnswer.episode must lie in \[0, 2\)"):
        replace(small, answers=(PageAnswer("Who?", "Ann", episode=episode),))


def test_sliding_layers_exist(small: Explanation) -> None:
    with pytest.raises(BadParameter, match=r"sliding_layers must lie in \[0, 2\)"):
        replace(small, sliding_layers=(2,))


@pytest.mark.parametrize(("lead", "tail"), [(2, 1), (-1, 0), (0, 3)])
def test_template_tokens_fit_in_the_message(lead: int, tail: int) -> None:
    with pytest.raises(BadParameter, match="PageMessage.lead_tokens"):
        PageMessage("user", "", "", ("a", "b"), lead, tail)
