"""Routing of finished turns to episodes, and the changes of a refresh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from jaxtyping import Float32

from larder import Conversation, Message, Policy
from larder.core import LayerSpec, ModelSpec, UsageError
from larder.session import (
    Embedder,
    Episode,
    Episodes,
    MatchRule,
    NearestEpisodeRouter,
    Single,
    resolve_budget_without_context,
)
from topic_embedder import TopicEmbedder

SPEC = ModelSpec(
    (LayerSpec(0, 4, 2, 8, 0.3), LayerSpec(1, 4, 2, 8, 0.3)), torch.float32, torch.device("cpu")
)


def topics(name: str) -> Embedder:
    return TopicEmbedder()


def words(text: str) -> int:
    return len(text.split())


def talk(*contents: str) -> Conversation:
    return Conversation("talk", tuple(Message("user", content) for content in contents))


def arranged(history: Conversation, *texts: str, **options: object) -> NearestEpisodeRouter:
    part = Episodes(**{"count": 2, "segment": 1, **options})  # pyright: ignore
    router = part.build_router(history, topics, words, texts)
    assert isinstance(router, NearestEpisodeRouter)
    return router


DOGS_AND_CARS = talk(*(f"my dog {n}" for n in range(6)), *(f"the car {n}" for n in range(6)))


def test_turn_on_a_known_topic_is_assigned_to_its_episode() -> None:
    router = arranged(DOGS_AND_CARS)
    filing = router.assign_turn("a dog barks", 0)
    grown = filing.router
    assert isinstance(grown, NearestEpisodeRouter)
    assert filing.number == 0 and len(grown.episodes) == 2
    assert grown.episodes[0].texts[-1] == "a dog barks"
    assert len(grown.episodes[0].rows) == len(router.episodes[0].rows) + 1
    assert np.array_equal(grown.episodes[0].centroid, router.episodes[0].centroid)
    assert grown.prompts() == router.prompts()


def test_turn_on_a_new_topic_opens_an_episode() -> None:
    router = arranged(DOGS_AND_CARS)
    filing = router.assign_turn("the star shines", 1)
    grown = filing.router
    assert isinstance(grown, NearestEpisodeRouter)
    assert filing.number == 2
    row = TopicEmbedder().embed_segments(["the star shines"])[0]
    assert np.array_equal(grown.episodes[2].centroid, row)
    assert grown.episodes[2].prompt_texts == ("the star shines",)
    assert grown.episodes[:2] == router.episodes


def test_assigning_a_turn_does_not_change_the_former_router() -> None:
    router = arranged(DOGS_AND_CARS)
    before = router.segments()
    router.assign_turn("a dog barks", 0)
    router.assign_turn("the star shines", 0)
    assert router.segments() == before and router.tau is None


def test_tau_is_calibrated_once_on_the_initial_segments() -> None:
    router = arranged(DOGS_AND_CARS)
    first = router.assign_turn("a dog barks", 0).router
    second = first.assign_turn("a strange dog", 0).router
    assert isinstance(first, NearestEpisodeRouter) and isinstance(second, NearestEpisodeRouter)
    rows = router.embedder.embed_segments(_texts(DOGS_AND_CARS))
    assert router.clusterer.tau(rows, rows, _places(rows), 2) == first.tau
    assert second.tau == first.tau


def test_turns_of_a_chat_with_too_few_segments_open_no_episode() -> None:
    router = arranged(talk())
    first = router.assign_turn("my dog", 0)
    assert first.number == 0
    second = first.router.assign_turn("the star shines", 0)
    assert second.number == 0
    assert second.router.segments() == [2]


def test_tau_at_quantile_zero_is_below_tau_at_a_high_quantile() -> None:
    rows = TopicEmbedder().embed_segments(_texts(DOGS_AND_CARS))
    strict, loose = Episodes(count=2, tau_quantile=0.0), Episodes(count=2, tau_quantile=0.9)
    places = _places(rows)
    assert strict.tau(rows, rows, places, 2) < loose.tau(rows, rows, places, 2)


def test_refresh_updates_the_centroid_of_one_episode() -> None:
    router = arranged(DOGS_AND_CARS, representatives=2).assign_turn("a dog barks", 0).router
    reform = router.refresh(0)
    after = reform.router
    assert isinstance(router, NearestEpisodeRouter) and isinstance(after, NearestEpisodeRouter)
    assert reform.rebuilt == (0,)
    rows = after.episodes[0].rows.astype(np.float64)
    assert np.allclose(after.episodes[0].centroid, rows.mean(0), atol=1e-6)
    assert not np.allclose(after.episodes[0].centroid, router.episodes[0].centroid)
    assert after.episodes[0].places == router.episodes[0].places
    assert after.episodes[1] is router.episodes[1]
    assert after.tau == router.tau


def test_refresh_can_choose_a_new_segment_as_representative() -> None:
    router = arranged(talk("the car", "dog sea", "dog star"), count=2, representatives=1)
    number = router.route("dog").episode  # pyright: ignore
    for text in ("dog dog", "dog a dog", "a dog dog"):
        router = router.assign_turn(text, number).router
    assert router.refresh(number).router.prompts()[number][0] in (
        "dog dog",
        "dog a dog",
        "a dog dog",
    )


def test_grown_chat_is_clustered_into_topics_in_turn_order() -> None:
    router = arranged(talk())
    for text in ("my dog", "the car", "a dog barks", "a car stops"):
        router = router.assign_turn(text, 0).router
    reform = router.refresh(0)
    after = reform.router
    assert isinstance(after, NearestEpisodeRouter)
    assert reform.rebuilt == (0, 1)
    assert [e.texts for e in after.episodes] == [
        ("my dog", "a dog barks"),
        ("the car", "a car stops"),
    ]
    assert after.tau is None, "tau belongs to the episodes it was calibrated on"


def test_too_few_segments_stay_one_episode() -> None:
    router = arranged(talk()).assign_turn("my dog", 0).router.assign_turn("the car", 0).router
    assert router.refresh(0).rebuilt == (0,)
    assert router.refresh(0).router.segments() == [2]


def test_segments_keep_their_order_through_new_episodes_and_refreshes() -> None:
    router = arranged(DOGS_AND_CARS)
    texts = ["a dog barks", "the star shines", "a car stops"]
    for text, number in zip(texts, (0, 0, 1), strict=True):
        router = router.assign_turn(text, number).router
    router = router.refresh(0).router
    assert isinstance(router, NearestEpisodeRouter)
    assert router._rows()[0] == (*_texts(DOGS_AND_CARS), *texts)


def test_turns_are_clustered_with_the_history() -> None:
    router = arranged(DOGS_AND_CARS, "a dog barks", "a car stops")
    assert router.segments() == [7, 7]


def test_short_chat_is_one_episode() -> None:
    assert arranged(talk(), "my dog", "the car", count=4).segments() == [2]
    assert len(arranged(talk(), "my dog", "the car", "a dog", "a car", count=4).segments()) == 2


def test_single_router_assigns_every_turn_to_its_cache() -> None:
    router = Single().build_router(talk("a"), topics, words, ("b",))
    assert router.assign_turn("anything", 0).number == 0
    assert router.refresh(0).rebuilt == (0,)


def test_router_without_episodes_routes_nowhere() -> None:
    router = NearestEpisodeRouter(TopicEmbedder(), MatchRule.COSINE, (), Episodes())
    assert router.route("dog") is None


@pytest.mark.parametrize("given", ["20%", None])
def test_fractional_budget_without_context_is_refused(given: str | None) -> None:
    policy = Policy.parse("pooled()" if given else "pooled(kept=0.2)")
    with pytest.raises(UsageError, match="share of the context"):
        resolve_budget_without_context(policy, given, SPEC)


def test_budget_without_context_has_a_default() -> None:
    open_end = Policy.parse("pooled()")
    assert resolve_budget_without_context(open_end, None, SPEC) == 512
    assert resolve_budget_without_context(open_end, "96", SPEC) == 96
    assert resolve_budget_without_context(Policy.parse("pooled(tokens=64)"), None, SPEC) == 64


def _places(rows: np.ndarray) -> list[tuple[int, ...]]:
    return [(index,) for index in range(len(rows))]


def _texts(conversation: Conversation) -> tuple[str, ...]:
    return tuple(message.content for message in conversation.messages)


def test_too_many_episodes_are_clustered_again() -> None:
    router = arranged(DOGS_AND_CARS)
    row = router.episodes[0].rows[0]
    extra = [Episode(row, row[None], (f"alone {n}",), (0,), (100 + n,)) for n in range(3)]
    crowded = replace(router, episodes=(*router.episodes, *extra))
    reform = crowded.refresh(0)
    assert isinstance(reform.router, NearestEpisodeRouter)
    assert len(reform.router.episodes) == 2 and reform.rebuilt == (0, 1)
    assert sum(len(episode.texts) for episode in reform.router.episodes) == 15


FOUR_TOPICS = talk(*(f"{topic} {n}" for topic in ("dog", "car", "sea", "star") for n in range(6)))


def test_tau_uses_the_silhouette_count_of_episodes() -> None:
    router = arranged(FOUR_TOPICS, count=0)
    assert len(router.episodes) == router.formed == 4
    filed = router.assign_turn("dog", 0).router
    assert isinstance(filed, NearestEpisodeRouter)
    rows = TopicEmbedder().embed_segments(_texts(FOUR_TOPICS))
    assert filed.tau == router.clusterer.tau(rows, rows, _places(rows), 4)
    assert filed.tau != router.clusterer.tau(rows, rows, _places(rows), 2)
    row = router.episodes[0].rows[0]
    extra = Episode(row, row[None], ("alone",), (0,), (100,))
    crowded = replace(router, episodes=(*router.episodes, extra))
    assert crowded.refresh(0).rebuilt == (0,), "five of four formed are not too many"


def test_fewer_topics_than_requested_are_not_reclustered() -> None:
    router = arranged(talk(*["dog", "car"] * 8), count=4)
    assert len(router.episodes) == 2
    assert router.refresh(0).rebuilt == (0,)


class CountingEmbedder(TopicEmbedder):
    """Notes the texts of every call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def embed_segments(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        self.calls.append(list(texts))
        return super().embed_segments(texts)


def test_tau_is_calibrated_on_exchanges_and_embeds_them_in_one_call() -> None:
    history = Conversation(
        "chat",
        tuple(
            Message(role, f"{role} speaks of dog {n}")
            for n in range(6)
            for role in ("user", "assistant")
        ),
    )
    embedder = CountingEmbedder()
    part = Episodes(count=2, segment=4)
    router = part.build_router(history, lambda name: embedder, words)
    assert len(embedder.calls) == 1, "reading does not pay for a chat"
    router.assign_turn("my dog", 0).router.assign_turn("my car", 0)
    [_, first, exchanges, second] = embedder.calls
    assert (first, second) == (["my dog"], ["my car"])
    assert exchanges == [f"user speaks of dog {n}\nassistant speaks of dog {n}" for n in range(6)]
