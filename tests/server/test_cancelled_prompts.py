"""Prompts whose client leaves in the middle of a long call of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from larder.models import LONG_CALL_TOKENS, ForwardBatch, LoadedModel
from larder.server import ChatMessage, RequestImages, Ticket
from larder.store import Tier
from server.test_images import QWEN, ImageClient
from server.test_images import loaded as image_model
from server.test_step_interruption import BLOCK, BUDGET, POLICIES
from server_core import Client, Served, answered, box_question, characters
from topic_embedder import TopicEmbedder

LAYERS = 4
ALWAYS = 1e-6  # a latency, in seconds, for which decode steps run before every layer


@dataclass
class LongLayers:
    """Count of the layers of long calls, and tickets that are cancelled behind one of them.

    Args:
        most: longest call so far, in tokens.
    """

    count: int = 0
    most: int = 0
    at: int = 0
    tickets: list[Ticket] = field(default_factory=list)

    def cancel(self, at: int, *tickets: Ticket) -> None:
        """Cancel requests behind the next `at` layers."""
        self.count, self.at, self.tickets = 0, at, list(tickets)

    def note(self, num_tokens: int) -> None:
        if num_tokens <= LONG_CALL_TOKENS:
            return
        self.count, self.most = self.count + 1, max(self.most, num_tokens)
        if self.count == self.at:
            for ticket in self.tickets:
                ticket.cancel()


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> LongLayers:
    layers, attend = LongLayers(), ForwardBatch.attend

    def counted(batch: ForwardBatch, inputs: Any) -> Any:
        out = attend(batch, inputs)
        layers.note(sum(batch.widths))
        return out

    monkeypatch.setattr(ForwardBatch, "attend", counted)
    return layers


@pytest.fixture(scope="module")
def deep() -> LoadedModel:
    return characters(layers=LAYERS)


def server(deep: LoadedModel, policy: str, seconds: float | None = None, **options: Any) -> Served:
    return Served(
        deep,
        POLICIES[policy],
        tokens=BUDGET,
        block=None if policy == "whole" else BLOCK,
        embedder=TopicEmbedder(),
        inter_token_seconds=seconds,
        **options,
    )


def used(served: Served) -> dict[Tier, int]:
    return {tier: served.core.ledger.used(tier) for tier in (Tier.DEVICE, Tier.HOST)}


def started(served: Served, name: str) -> Client:
    """A client with an answer in progress."""
    client, _ = served.submit(box_question(3), name, max_new_tokens=60)
    while not client.text:
        served.step()
    return client


def of_policies(*default: str) -> Callable[..., Any]:
    """Parameters of a test: every policy, and latencies between tokens; under one, prompts of
    `full` are read in short calls."""
    cases = [(policy, seconds) for policy in POLICIES for seconds in (None, ALWAYS)]
    cases.remove(("full", ALWAYS))
    return pytest.mark.parametrize(
        ("policy", "seconds"),
        [
            pytest.param(*each, marks=() if each[0] in default else pytest.mark.extended)
            for each in cases
        ],
    )


@of_policies("limited")
def test_cancelled_prompt_ends_before_its_next_layer(
    deep: LoadedModel, layers: LongLayers, policy: str, seconds: float | None
) -> None:
    text, alone = box_question(2, 24), server(deep, policy)
    beside = started(alone, "beside")
    alone.run()
    layers.count = 0
    expected, _ = alone.submit(text, "new")
    while not expected.text:
        alone.step()
    every = layers.count
    alone.run()
    assert every >= LAYERS
    for at in sorted({1, LAYERS - 1, every // 2, every - 1}):
        served = server(deep, policy, seconds)
        # Without a latency, the end of a prompt shares its call with the answers beside it.
        other = None if seconds is None else started(served, "beside")
        before = used(served)
        client, ticket = served.submit(text, "new")
        layers.cancel(at, ticket)
        while client.report is None:
            served.step()
        assert layers.count == at and client.result.reason == "cancelled" and not client.text
        assert not served.core.sessions.has("a", "new")
        assert used(served)[Tier.DEVICE] <= before[Tier.DEVICE]
        served.run()
        assert other is None or (other.result and other.text == beside.text)
        again = served.ask(text, "new")
        assert again.text == expected.text
        assert again.result.prompt_tokens == expected.result.prompt_tokens


@of_policies("limited")
def test_session_is_unchanged_by_a_message_cancelled_between_layers(
    deep: LoadedModel, layers: LongLayers, policy: str, seconds: float | None
) -> None:
    def ended(served: Served, at: int) -> str:
        """Text of a third turn, before which another was cancelled behind `at` layers."""
        turns: list[ChatMessage] = box_question(1, 6)
        turns = answered(turns, served.ask(turns, "x"), "Why?")
        turns = answered(turns, served.ask(turns, "x"), "")[:-1]
        if at:
            started(served, "beside")
            [long] = box_question(2, 24)
            client, ticket = served.submit([*turns, long], "x")
            layers.cancel(at, ticket)
            while client.report is None:
                served.step()
            assert client.result.reason == "cancelled" and layers.count == at
            served.run()
            session = served.core.sessions.find("a", "x")
            assert len(session.turns) == 2 and not session.usage.is_answering
        return served.ask([*turns, *box_question(4)], "x").text

    expected = ended(server(deep, policy), 0)
    for at in (1, LAYERS - 1, LAYERS + 1):
        assert ended(server(deep, policy, seconds), at) == expected


@pytest.mark.parametrize("seconds", [None, ALWAYS])
def test_prompt_read_with_a_cancelled_one_continues(
    deep: LoadedModel, layers: LongLayers, seconds: float | None
) -> None:
    texts = {"one": box_question(1, 8), "two": box_question(5, 8)}
    expected = {name: server(deep, "full").ask(text, name).text for name, text in texts.items()}

    def begin(*cancelled: str, at: int) -> tuple[Served, dict[str, Client]]:
        served = server(deep, "full", seconds)
        clients, tickets = dict[str, Client](), dict[str, Ticket]()
        for name, text in texts.items():
            clients[name], tickets[name] = served.submit(text, name)
        layers.cancel(at, *(tickets[name] for name in cancelled))
        served.run()
        return served, clients

    _, clients = begin(at=0)
    assert layers.most > 1.5 * len(texts["one"][0].text)  # both in one call
    served, clients = begin("one", at=2)
    assert layers.count == LAYERS  # the call goes on for the other one
    assert clients["one"].result.reason == "cancelled" and not clients["one"].text
    assert clients["two"].text == expected["two"]
    assert served.ask(texts["one"], "one").text == expected["one"]
    served, clients = begin(*texts, at=2)
    assert layers.count == 2
    assert {client.result.reason for client in clients.values()} == {"cancelled"}
    assert used(served) == {Tier.DEVICE: 0, Tier.HOST: 0}
    for name, text in texts.items():
        assert served.ask(text, name).text == expected[name]


def test_scored_prompt_ends_between_layers(deep: LoadedModel, layers: LongLayers) -> None:
    options: dict[str, Any] = {"prompt_logprobs": True, "logprobs": 1, "max_new_tokens": 1}
    expected = server(deep, "full").ask(box_question(2, 24), **options)
    served = server(deep, "full")
    client, ticket = served.submit(box_question(2, 24), **options)
    layers.cancel(LAYERS + 2, ticket)
    served.run()
    assert layers.count == LAYERS + 2 and client.result.reason == "cancelled"
    assert used(served) == {Tier.DEVICE: 0, Tier.HOST: 0}
    assert served.ask(box_question(2, 24), **options).logprobs == expected.logprobs


@pytest.mark.parametrize("at", [1, 2])
def test_prompt_with_an_image_ends_between_layers(layers: LongLayers, at: int) -> None:
    """Calls with images have hooks of their own, between whose layers no steps run."""
    served = Served(image_model(QWEN), block=BLOCK, inter_token_seconds=ALWAYS)
    one = ImageClient(served, RequestImages())
    turns = [one.message("Look: ", 10, " an then say with care: " * 10)]
    expected = one.ask(turns, "before").text
    assert layers.most > LONG_CALL_TOKENS
    served = one.served = Served(image_model(QWEN), block=BLOCK, inter_token_seconds=ALWAYS)
    other = started(served, "beside")
    before = used(served)[Tier.DEVICE]
    client, ticket = served.submit(turns, "x", images=one.images.files)
    layers.cancel(at, ticket)
    while client.report is None:
        served.step()
    assert layers.count == at and client.result.reason == "cancelled"
    assert used(served)[Tier.DEVICE] <= before
    served.run()
    assert other.result and one.ask(turns).text == expected
