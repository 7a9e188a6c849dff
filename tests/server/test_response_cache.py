"""Response cache by question similarity: entries, tenants and expiry."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from larder import Engine
from larder.core import UnknownName, UsageError
from larder.engine import SamplingParams
from larder.models import LoadedModel
from larder.server import (
    ApiError,
    CachedResponse,
    CachedUse,
    ChatMessage,
    EngineOptions,
    LocalEngineClient,
    Request,
    ResponseCategory,
    ResponseEntry,
    TenantCategory,
)
from larder.session import Embedder
from server_core import Client
from server_engine_clients import Waiting

NOW = 100.0


def row(angle: float) -> np.ndarray:
    return np.array([np.cos(angle), np.sin(angle)], np.float32)


def entry(number: int, uses: int) -> ResponseEntry:
    return ResponseEntry("", row(float(number)), f"q{number}", uses=uses)


def test_full_category_keeps_the_heaviest_entries() -> None:
    own = TenantCategory(ResponseCategory(quota=2))
    five, three, four, two = entry(0, 5), entry(1, 3), entry(2, 4), entry(3, 2)
    assert own.keep(five, "5", 1.0, NOW) and own.keep(three, "3", 1.0, NOW)
    assert own.keep(four, "4", 1.0, NOW) and [each.answer for each in own.kept] == ["5", "4"]
    assert not own.keep(two, "2", 1.0, NOW) and [each.answer for each in own.kept] == ["5", "4"]


def test_frequent_question_eventually_replaces_an_entry() -> None:
    own = TenantCategory(ResponseCategory(quota=1))
    assert own.keep(own.note("", row(0.0), "a"), "a", 2.0, NOW)
    asked = 0
    while not own.keep(own.note("", row(1.0), "b"), "b", 1.0, NOW):
        asked += 1
    assert asked == 2 and [each.question for each in own.kept] == ["b"]


def test_lookup_is_by_similarity_conversation_and_ttl() -> None:
    own = TenantCategory(ResponseCategory(threshold=0.9, ttl=10.0))
    for angle in (0.0, 0.3):
        own.keep(own.note("here", row(angle), f"{angle}"), f"{angle}", 1.0, NOW)
    found = own.find("here", row(0.25), NOW + 9)
    assert found is not None and found.answer == "0.3" and found.uses == 2
    assert own.find("there", row(0.25), NOW) is None and own.find("here", row(1.0), NOW) is None
    assert [each.answer for each in own.examples(row(0.25), NOW)] == ["0.0", "0.3"]
    assert own.find("here", row(0.25), NOW + 10) is None and not own.kept


def test_category_rules_are_parsed_and_validated() -> None:
    name, rules = ResponseCategory.parse("faq:threshold=0.8,ttl=60,quota=5,embedder=tokens")
    assert (name, rules) == ("faq", ResponseCategory(0.8, 60.0, 5, embedder="tokens"))
    assert ResponseCategory.parse("faq") == ("faq", ResponseCategory())
    for wrong in ("faq:threshold=2", "faq:size=1", "faq:quota=many", "faq:ttl=0", ":ttl=5"):
        with pytest.raises(UsageError):
            ResponseCategory.parse(wrong)


class FirstWordEmbedder(Embedder):
    """Questions are alike if their first words are."""

    @property
    def name(self) -> str:
        return "first words"

    def embed_segments(self, texts: Sequence[str]) -> np.ndarray:
        return self.embed_questions(texts)

    def embed_questions(self, texts: Sequence[str]) -> np.ndarray:
        return np.stack([row(sum(map(ord, text.split()[0])) / 7) for text in texts])

    def reads_whole(self, text: str) -> bool:
        return len(text.split()) < 20


class CachedClient:
    """Client of an engine with a category `faq`."""

    def __init__(self, small: LoadedModel, **rules: float) -> None:
        engine = Engine(small, policy="full")
        engine.runtime = replace(engine.runtime, embedder=lambda name: FirstWordEmbedder())
        times = count(1)
        self.client = LocalEngineClient(
            engine,
            EngineOptions(clock=lambda: float(next(times))),
            response_categories={"faq": ResponseCategory(**rules)},  # pyright: ignore
        )

    def ask(self, *texts: str, tenant: str = "a", **options: object) -> Waiting:
        roles = ("user", "assistant")
        turns = tuple(ChatMessage(roles[n % 2], text) for n, text in enumerate(texts))
        own: dict[str, object] = {"cached_response": CachedResponse("faq"), **options}
        request = Request(tenant, turns, max_new_tokens=4, **own)  # pyright: ignore
        waiting = Waiting()
        self.client.submit(request, waiting)
        assert waiting.over.wait(30)
        return waiting


def test_cached_response_is_returned_to_its_tenant_only(small: LoadedModel) -> None:
    cached = CachedClient(small)
    with closing(cached.client):
        first, again = cached.ask("Box 7 holds?"), cached.ask("Box seven, what does it hold?")
        assert again.result.tier == "response" and again.text == first.text
        assert first.result.tier != "response" and again.result.new_tokens == 0
        asked = [
            cached.ask("Box 7 holds?", tenant="b"),
            cached.ask("Coin 7 holds?"),
            cached.ask("Hi.", "Hello.", "Box 7 holds?"),
            cached.ask("Box 7 holds?", cached_response=None),
            cached.ask("Box 7 holds?", stop=("x",)),
        ]
        assert all(each.result.tier != "response" for each in asked)
        assert cached.client.responses.hits == 1


def test_sampled_responses_are_reused_only_on_request(small: LoadedModel) -> None:
    cached, hot = CachedClient(small), SamplingParams(temperature=1.0)
    with closing(cached.client):
        for _ in range(2):
            assert cached.ask("Box 7?", sampling=hot).result.tier != "response"
        wanted = CachedResponse("faq", is_sampled=True)
        cached.ask("Box 7?", sampling=hot, cached_response=wanted)
        again = cached.ask("Box 7?", sampling=hot, cached_response=wanted)
        assert again.result.tier == "response"


def test_cached_examples_precede_the_question(small: LoadedModel) -> None:
    cached = CachedClient(small)
    wanted = CachedResponse("faq", CachedUse.EXAMPLES, key="plan")
    with closing(cached.client):
        first = cached.ask("Open box 7.", cached_response=wanted)
        second = cached.ask("Open box 9.", cached_response=wanted)
        shown = cached.ask("Open box 7.", first.text, "Open box 9.", cached_response=None)
        assert (
            second.text == shown.text and second.result.prompt_tokens == shown.result.prompt_tokens
        )
        assert second.result.prompt_tokens > first.result.prompt_tokens


def test_uncacheable_requests_are_refused(small: LoadedModel) -> None:
    cached = CachedClient(small)
    with closing(cached.client):
        refused: list[dict[str, Any]] = [
            {"session": "x"},
            {"contexts": ("One.",)},
            {"choice_group": "g"},
            {"logprobs": 2},
            {"cached_response": CachedResponse("other")},
        ]
        for wrong in refused:
            with pytest.raises(ApiError) as raised:
                cached.ask("Box 7?", **wrong)
            assert raised.value.param == "response_cache" and raised.value.status == 400


def test_missing_embedder_is_an_error_at_startup(small: LoadedModel) -> None:
    with pytest.raises(UnknownName, match="guess"):
        categories = {"faq": ResponseCategory(embedder="guess")}
        LocalEngineClient(Engine(small, policy="full"), response_categories=categories)


def test_cached_truncated_answer_keeps_its_finish_reason(small: LoadedModel) -> None:
    cached = CachedClient(small)
    with closing(cached.client):
        first, again = cached.ask("Box 7?"), cached.ask("Box 7?")
        assert (
            again.result.tier == "response"
            and again.result.reason == first.result.reason == "length"
        )


def test_entry_stores_the_question_that_was_answered(small: LoadedModel) -> None:
    cached, wanted = CachedClient(small), CachedResponse("faq", CachedUse.EXAMPLES, key="plan")
    asked = Request("a", (ChatMessage("user", "Never."),), cached_response=wanted, max_new_tokens=4)
    cached.client.responses.take(asked, Client())
    with closing(cached.client):
        for text in ("Open 7.", "Open 9.", "Open 7."):
            cached.ask(text, cached_response=wanted)
        own = cached.client.responses._of("a", "faq", 0.0)
        assert [each.question for each in own.kept] == ["Open 7.", "Open 9."]


def test_questions_longer_than_the_embedder_are_not_cached(small: LoadedModel) -> None:
    cached = CachedClient(small)
    with closing(cached.client):
        for text in ("Lamp" + " on" * 20, "Lamp" + " off" * 20):
            assert cached.ask(text).result.tier != "response"
        with pytest.raises(ApiError, match="characters"):
            cached.ask("x" * 1_000_000)
        assert not cached.client.responses._tenants


def test_tenants_with_only_expired_entries_are_dropped(small: LoadedModel) -> None:
    cached = CachedClient(small, ttl=1000.0)
    with closing(cached.client):
        cached.ask("Box 7?")
        cached.ask("Box 7?", tenant="b")
        assert len(cached.client.responses._tenants) == 2
        cached.client.responses._of("c", "faq", 5000.0)
        assert list(cached.client.responses._tenants) == [("c", "faq")]


def test_full_queue_refuses_a_request_before_embedding_it(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached, embedded = CachedClient(small), list[str]()
    embed = FirstWordEmbedder.embed_questions

    def counted(self: FirstWordEmbedder, texts: Sequence[str]) -> np.ndarray:
        embedded.extend(texts)
        return embed(self, texts)

    monkeypatch.setattr(FirstWordEmbedder, "embed_questions", counted)
    queue = cached.client.context.core.scheduler.queue
    with closing(cached.client):
        monkeypatch.setattr(queue, "_most", 0)
        with pytest.raises(ApiError) as raised:
            cached.ask("Box 7?")
        assert raised.value.status == 503 and not embedded
        assert cached.client.context.core.refused.counts() == {"overloaded": 1}
        monkeypatch.setattr(queue, "_most", 8)
        cached.ask("Box 7?")
        assert embedded == ["Box 7?"]


@pytest.mark.parametrize("quota", [1000, 1])
def test_deleted_session_removes_its_cached_responses(small: LoadedModel, quota: int) -> None:
    cached = CachedClient(small, quota=quota)
    with closing(cached.client):
        other = cached.ask("Coin 7?", tenant="b")
        kept, gone = cached.ask("Coin 7?"), cached.ask("Box 7?")
        assert cached.client.remove("a", gone.result.session) == ()
        own = cached.client.responses._tenants["a", "faq"]
        left = [*own.kept, *own._asked.values()]
        assert all(each.session == kept.result.session for each in left)
        assert cached.ask("Box 7?").result.tier != "response"
        assert cached.ask("Coin 7?").result.tier == "response"
        assert cached.ask("Coin 7?", tenant="b").text == other.text
        assert cached.client.responses.hits == 2


def test_private_responses_are_not_cached(small: LoadedModel) -> None:
    cached, private = CachedClient(small), CachedResponse("faq", is_kept=False)
    with closing(cached.client):
        cached.ask("Box 7?", cached_response=private)
        own = cached.client.responses._of("a", "faq", 0.0)
        assert not own.kept and not own._asked
        first = cached.ask("Box 7?")
        assert first.result.tier != "response"
        assert cached.ask("Box 7?", cached_response=private).text == first.text
        assert cached.client.responses.hits == 1
