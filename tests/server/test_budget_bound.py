"""Budget of a session, at rest and during a turn."""

from __future__ import annotations

import pytest

from budget_bounds import KEYDIFF, SENTENCES, held, most, peaks
from larder.models import LoadedModel
from larder.server import ChatMessage
from larder.server.session_info import session_info
from server_core import Served, answered, characters, user
from topic_embedder import TopicEmbedder

BUDGET, BLOCK = 96, 32
SAID = ["My dog is 7.", "The car is red. " * 6, "What car?", "Why is it so?"]
QUICK = ("keydiff", "snapkv", "h2o_while_reading", "epicache", "icecache", "int4")


@pytest.fixture(scope="module")
def deep() -> LoadedModel:
    return characters(layers=3)


def serving(loaded: LoadedModel, sentence: str) -> Served:
    block = None if "whole()" in sentence else BLOCK
    return Served(loaded, sentence, tokens=BUDGET, block=block, embedder=TopicEmbedder())


def check_rest(served: Served, name: str) -> tuple[int, int]:
    """Every cache of a session at rest; what one may hold, at rest and while a turn runs."""
    session = served.core.sessions.find("a", name)
    assert session.residency.chat_cache is not None
    caches, policy = session.residency.chat_cache.caches, session.serving.policy
    bounds = 0, 0
    for cache in caches.copies():
        bounds = most(policy, cache, session.serving.block)
        assert held(cache) <= bounds[0]
    return bounds


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in SENTENCES]
)
def test_session_holds_at_most_budget_plus_one_block(
    deep: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    served, turns = serving(deep, SENTENCES[name]), list[ChatMessage]()
    long = "whole()" in SENTENCES[name]  # which reads a message beyond the budget as a whole
    texts = [text for text in SAID if not long or len(text) < BUDGET // 2]
    for text, after in zip(texts, [*texts[1:], ""], strict=True):
        turns = turns or [user(text)]
        with peaks(monkeypatch) as peak:
            client = served.ask(turns, "x", max_new_tokens=40)
        _, running = check_rest(served, "x")
        assert peak.entries <= running, text
        turns = answered(turns, client, after)


@pytest.mark.extended
def test_rebuilt_cache_stays_within_the_bound(
    deep: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, lost = (serving(deep, KEYDIFF) for _ in range(2))
    turns = [user(SAID[0])]
    for more in ["And?", "The car is red.", "Why?"]:
        with peaks(monkeypatch) as peak:
            again = lost.ask(turns, "x", max_new_tokens=40)
        client = kept.ask(turns, "x", max_new_tokens=40)
        assert again.text == client.text, "a cache is built again as it was"
        _, running = check_rest(lost, "x")
        assert peak.entries <= running
        turns = answered(turns, client, more)
        lost.core.tiers.drop(lost.core.sessions.find("a", "x"))


@pytest.mark.extended
def test_branch_and_edit_stay_within_the_bound(
    deep: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serving(deep, KEYDIFF)
    first = [user(SAID[0])]
    turns = answered(first, served.ask(first, "x", max_new_tokens=40), SAID[1])
    served.ask(turns, "x", max_new_tokens=40)
    with peaks(monkeypatch) as peak:
        client = served.ask([*turns[:-1], user("The sea is 5.")], "x", max_new_tokens=40)
    _, running = check_rest(served, client.result.session)
    assert client.result.session != "x" and peak.entries <= running


def test_session_view_reports_held_and_budget_tokens(deep: LoadedModel) -> None:
    served = serving(deep, KEYDIFF)
    served.ask([user(SAID[1])], "x", max_new_tokens=40)
    view = session_info(served.core.sessions.find("a", "x")).as_json()
    assert view["held_tokens"] == view["budget_tokens"] == BUDGET
    full = Served(deep)
    full.ask([user(SAID[1])], "x", max_new_tokens=40)
    view = session_info(full.core.sessions.find("a", "x")).as_json()
    assert view["budget_tokens"] is None and view["held_tokens"] > BUDGET
