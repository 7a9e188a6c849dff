"""Decode steps between the layers of long prefill blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from larder.models import Decoder, ForwardBatch, LoadedModel
from larder.server import ChatMessage, Request, Ticket
from server_core import LIMITED, STEPWISE, Client, Served, box_question, characters
from topic_embedder import TopicEmbedder

LAYERS, BLOCK, BUDGET, TARGET = 8, 160, 200, 0.3
TOKEN_SECONDS = 0.001  # of one layer
POLICIES = {
    "full": "full",
    "limited": LIMITED,
    "stepwise": STEPWISE,
    "episodes": (
        "episodes(count=2) > episodic() > protect(sinks=4, recent=8) > "
        'patched(prompt="episode") > uniform() > drop()'
    ),
    "reconstructed": "blockwise() > protect(sinks=4, recent=8) > reconstruct() > pooled()",
    "whole": "kvzip",
}


@dataclass
class Clock:
    """Seconds that go on with the tokens that layers take, and the most of these."""

    now: float = 1e9
    longest: int = 0

    def __call__(self) -> float:
        return self.now


@dataclass
class TimedClient(Client):
    """Client that writes down the seconds at which parts of its answer came."""

    clock: Callable[[], float] = float
    times: list[float] = field(default_factory=list)

    def on_text(self, text: str) -> None:
        self.text += text
        self.times.append(self.clock())


@pytest.fixture(scope="module")
def deep() -> LoadedModel:
    return characters(layers=LAYERS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Clock that long layers advance."""
    clock, attend = Clock(), ForwardBatch.attend

    def timed(batch: ForwardBatch, inputs):  # pyright: ignore
        out = attend(batch, inputs)
        clock.now += TOKEN_SECONDS * inputs.queries.shape[1]
        clock.longest = max(clock.longest, inputs.queries.shape[1])
        return out

    monkeypatch.setattr(ForwardBatch, "attend", timed)
    return clock


@dataclass
class Conversations:
    """Server with an answer in progress, beside which the prompt of another client is read.

    Args:
        gaps: seconds between two parts of that answer until the first token of the prompt.
        longest: most tokens that a layer took until then. Rebuilds of episodes follow, once no
            request is left.
    """

    served: Served
    clock: Clock
    gaps: list[float] = field(default_factory=list)
    longest: int = 0

    def client(self, turns: list[ChatMessage], name: str, new_tokens: int) -> TimedClient:
        client = TimedClient(served=self.served, clock=self.clock)
        request = Request(name, tuple(turns), name, max_new_tokens=new_tokens)
        self.served.core.submit(request, client, 0.0)
        return client

    def run(self) -> tuple[str, str]:
        """The texts of both answers."""
        self.clock.longest = 0
        first = self.client(box_question(1), "first", 90)
        while len(first.times) < 3:
            self.served.step()
        second, started = self.client(box_question(2, 24), "second", 3), len(first.times)
        while not second.times:
            assert first.report is None and second.error is None, second.error
            self.served.step()
        times = [each for each in first.times[started - 1 :] if each <= second.times[0]]
        times.append(second.times[0])
        self.gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        self.longest = self.clock.longest
        self.served.run()
        assert first.result and second.result
        return first.text, second.text


def conversations(
    deep: LoadedModel, clock: Clock, policy: str, target: float | None
) -> Conversations:
    served = Served(
        deep,
        POLICIES[policy],
        tokens=BUDGET,
        block=None if policy == "whole" else BLOCK,
        embedder=TopicEmbedder(),
        inter_token_seconds=target,
    )
    served.core.token_budget._clock = clock
    return Conversations(served, clock)


@pytest.mark.parametrize(
    "policy",
    [
        "limited",
        *(pytest.param(name, marks=pytest.mark.extended) for name in POLICIES if name != "limited"),
    ],
)
def test_decode_steps_run_between_layers_of_a_block(
    deep: LoadedModel, clock: Clock, policy: str
) -> None:
    plain = conversations(deep, clock, policy, None)
    expected = plain.run()
    # Without a target a whole block lies between two tokens.
    assert max(plain.gaps) > 0.9 * LAYERS * BLOCK * TOKEN_SECONDS
    bounded = conversations(deep, clock, policy, TARGET)
    assert bounded.run() == expected
    # A step starts once it is due, behind the layer that is computed then.
    layer = max(plain.longest, bounded.longest) * TOKEN_SECONDS
    assert len(bounded.gaps) > 3 and layer < 0.2 * max(plain.gaps)
    assert max(bounded.gaps) < TARGET + 1.1 * layer


@pytest.mark.extended
def test_first_message_beyond_the_budget_is_prefilled_under_episodes(deep: LoadedModel) -> None:
    served = Served(
        deep, POLICIES["episodes"], tokens=BUDGET, block=BLOCK, embedder=TopicEmbedder()
    )
    told_all = served.ask(box_question(2, 24), "long", max_new_tokens=2)
    assert told_all.result.prompt_tokens > 2 * BUDGET


@dataclass
class ClientBetweenLayers(TimedClient):
    """Client that acts on a part of its answer that comes between the layers of a call."""

    ticket: Ticket | None = None
    act: Callable[[ClientBetweenLayers], None] = float  # pyright: ignore
    is_reading: Callable[[], bool] = bool

    def on_text(self, text: str) -> None:
        super().on_text(text)
        if self.is_reading():
            self.act(self)


def beside_a_prompt(
    deep: LoadedModel,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[ClientBetweenLayers], None],
) -> tuple[Conversations, ClientBetweenLayers, TimedClient]:
    """A prompt with an answer in progress beside it, whose client acts between layers."""
    depth, forward = [0], Decoder._run

    def counted(decoder: Decoder, *args: Any, **options: Any) -> Any:
        depth[0] += 1
        try:
            return forward(decoder, *args, **options)
        finally:
            depth[0] -= 1

    monkeypatch.setattr(Decoder, "_run", counted)
    talks = conversations(deep, clock, "limited", TARGET)
    first = ClientBetweenLayers(
        served=talks.served, clock=clock, act=act, is_reading=lambda: depth[0] > 0
    )
    request = Request("first", tuple(box_question(1)), "first", max_new_tokens=90)
    first.ticket = talks.served.core.submit(request, first, 0.0)
    while len(first.times) < 3:
        talks.served.step()
    return talks, first, talks.client(box_question(2, 24), "second", 3)


def test_scheduler_error_between_layers_does_not_fail_the_prompt(
    deep: LoadedModel, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = conversations(deep, clock, "limited", None).run()

    def fail(client: ClientBetweenLayers) -> None:
        raise ValueError("no text is taken")

    def fail_again(client: TimedClient, error: Exception) -> None:
        raise RuntimeError("no error is taken") from error

    monkeypatch.setattr(ClientBetweenLayers, "on_error", fail_again, raising=False)
    talks, _, second = beside_a_prompt(deep, clock, monkeypatch, fail)
    with pytest.raises(RuntimeError, match="no error is taken"):
        talks.served.run()
    assert second.error is None
    talks.served.run()
    assert second.result and second.text == expected


def test_cancelled_answer_takes_no_steps_between_layers(
    deep: LoadedModel, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = list[int]()

    def cancel(client: ClientBetweenLayers) -> None:
        assert client.ticket is not None
        client.ticket.cancel()
        parts.append(len(client.times))

    talks, first, second = beside_a_prompt(deep, clock, monkeypatch, cancel)
    talks.served.run()
    assert len(parts) == 1 and len(first.times) == parts[0]
    assert first.result.reason == "cancelled" and second.result
