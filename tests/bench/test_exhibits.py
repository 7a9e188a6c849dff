"""Exhibits of budgets and maps have the contents of the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chats import EPISODES, HISTORY, under
from larder.core import BadParameter
from larder.models import LoadedModel
from larder.session import ConversationMemory, NearestEpisodeRouter, SingleCacheRouter
from larder_bench.studies.exhibits import budget_rows, cluster_row, exhibit_rows


@pytest.fixture(scope="module")
def memory(seed_model: LoadedModel) -> ConversationMemory:
    return under(seed_model, EPISODES).read(HISTORY)


@pytest.mark.extended
def test_budgets_are_those_of_every_episode(memory: ConversationMemory) -> None:
    before = memory.caches.active_number
    rows = budget_rows(memory)
    assert memory.caches.active_number == before
    assert [row["episode"] for row in rows] == [0, 1]
    for row in rows:
        lengths = memory.caches.activate(row["episode"]).lengths()
        assert row["row"] == "budgets"
        assert row["lengths"] == [list(layer) for layer in lengths]
        assert row["context_tokens"] == memory.figures.context_tokens


def test_episode_map_has_every_segment_deterministically(
    memory: ConversationMemory,
) -> None:
    row = cluster_row(memory)
    assert [row] == exhibit_rows(memory)[2:]
    router, segments = memory.router, row["segments"]
    assert isinstance(router, NearestEpisodeRouter)
    assert [segment["place"] for segment in segments] == list(range(len(segments)))
    for number, episode in enumerate(router.episodes):
        own = [segment for segment in segments if segment["episode"] == number]
        assert tuple(segment["text"] for segment in own) == episode.texts
        chosen = tuple(n for n, segment in enumerate(own) if segment["representative"])
        assert chosen == episode.representatives
        assert all(-1.001 <= segment["similarity"] <= 1.001 for segment in own)
    assert len({(segment["x"], segment["y"]) for segment in segments}) == len(segments)


def test_undrawable_maps_are_refused(memory: ConversationMemory) -> None:
    few = replace(memory, router=replace(memory.router, episodes=()))  # pyright: ignore
    with pytest.raises(BadParameter, match="needs 3 segments or more, got 0"):
        cluster_row(few)
    with pytest.raises(BadParameter, match="needs a policy that forms them"):
        cluster_row(replace(memory, router=SingleCacheRouter()))
    assert [row["row"] for row in exhibit_rows(few)] == ["budgets"]
