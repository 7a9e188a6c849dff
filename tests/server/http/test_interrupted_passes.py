"""Failures around decode steps between the layers of a long pass, over HTTP and a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from peft import LoraConfig, get_peft_model  # pyright: ignore

from larder import Engine
from larder.cache import step_layout
from larder.core import StoreFull
from larder.models import LONG_CALL_TOKENS, DecoderStack, ForwardBatch, LoadedModel, with_adapters
from larder.server import (
    Archive,
    ChatMessage,
    EngineOptions,
    HttpSettings,
    LocalEngineClient,
    LoopbackAuth,
    ModelRouter,
    Request,
    StepInterruption,
    TurnLock,
    create_app,
    request_state,
)
from larder.store import Tier
from server.http.running_server import awaited, listening
from server.test_step_interruption import POLICIES
from server_core import Client, box_question, characters
from server_engine_clients import Waiting, failing
from server_stores import Stored
from tiny_models import tiny

LAYERS, BLOCK, BUDGET = 6, 160, 200
ALWAYS = 1e-6  # a latency, in seconds, for which decode steps run before every layer
PROMPT = EngineOptions(inter_token_seconds=ALWAYS)
LONG = box_question(2, 24)


@dataclass
class Pass:
    """Long passes of the model's thread: their layers, and what happens in front of one.

    Args:
        at: number of the layer in front of which `act` is called, once.
    """

    layers: int = 0
    at: int = 0
    act: Callable[[], None] = float  # pyright: ignore
    is_open: bool = False

    def before(self, at: int, act: Callable[[], None]) -> None:
        self.layers, self.at, self.act = 0, at, act

    def note(self, batch: ForwardBatch) -> None:
        if sum(batch.widths) > LONG_CALL_TOKENS:
            self.layers += 1
            if self.layers == self.at:
                self.act()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Pass:
    reading, attend = Pass(), ForwardBatch.attend

    def noted(batch: ForwardBatch, inputs: Any) -> Any:
        reading.note(batch)
        return attend(batch, inputs)

    monkeypatch.setattr(ForwardBatch, "attend", noted)
    return reading


@pytest.fixture(scope="module")
def deep() -> LoadedModel:
    return characters(layers=LAYERS)


def engine(loaded: LoadedModel, policy: str = "limited") -> Engine:
    return Engine(loaded, policy=POLICIES[policy], budget=str(BUDGET), block=BLOCK)


def texts(deep: LoadedModel) -> tuple[str, str]:
    """Texts of an answer in progress and of a long prompt, each generated alone."""
    with closing(LocalEngineClient(engine(deep))) as hub:
        return asked(hub, box_question(1), "first", 90).text, asked(hub, LONG, "long", 3).text


def asked(hub: Any, turns: list[ChatMessage], name: str, new: int, **more: Any) -> Waiting:
    client = Waiting()
    hub.submit(Request("a", tuple(turns), name, max_new_tokens=new, **more), client)
    client.wait()
    return client


@dataclass
class Gate:
    """Gate that the model's thread waits at, between two layers, until a client has left."""

    reached: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        self.reached.set()
        assert self.left.wait(30)


@dataclass
class Conversation:
    """A server, its address, and the events of cancellations."""

    hub: LocalEngineClient
    url: str
    cancelled: threading.Event

    def body(self, turns: list[ChatMessage], name: str, new: int) -> dict[str, Any]:
        messages = [{"role": each.role, "content": each.text} for each in turns]
        found = {"model": "characters", "messages": messages, "session_id": name}
        return found | {"max_tokens": new, "temperature": 0, "stream": True}

    def lines(self, stack: ExitStack, turns: list[ChatMessage], name: str, new: int) -> Any:
        """Lines of a stream, which is left with the stack."""
        http = stack.enter_context(httpx2.Client(timeout=60))
        body = self.body(turns, name, new)
        path = f"{self.url}/v1/chat/completions"
        return stack.enter_context(http.stream("POST", path, json=body)).iter_lines()

    def used(self) -> int:
        core = self.hub.context.core
        return self.hub.context.call(lambda: core.ledger.used(Tier.DEVICE))


@pytest.fixture
def talk(deep: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Conversation]:
    cancelled, cancel = threading.Event(), request_state.RequestState.cancel

    def noted(state: request_state.RequestState) -> None:
        cancel(state)
        cancelled.set()

    monkeypatch.setattr(request_state.RequestState, "cancel", noted)
    hub = LocalEngineClient(engine(deep), options=PROMPT)
    app = create_app(hub, LoopbackAuth(), Archive(), HttpSettings(max_new_tokens=100))
    with listening(app) as url:
        yield Conversation(hub, url, cancelled)


@pytest.mark.failure(number=19)
def test_client_that_leaves_between_layers_stops_no_prompt(
    deep: LoadedModel, talk: Conversation, reading: Pass
) -> None:
    first_text, long_text = texts(deep)
    gate = Gate()
    reading.before(LAYERS + 3, gate.wait)
    with ExitStack() as first:
        lines = talk.lines(first, box_question(1), "first", 90)
        while "content" not in next(lines):
            continue
        second = Waiting()
        talk.hub.submit(Request("a", tuple(LONG), "long", max_new_tokens=3), second)
        assert gate.reached.wait(30)
    assert talk.cancelled.wait(30)
    steps = talk.hub.context.core.scheduler.steps
    gate.left.set()
    second.wait()
    assert second.text == long_text
    # No step of the answer that was left ran between the layers behind.
    assert talk.hub.context.core.scheduler.steps - steps <= 4
    assert not talk.hub.context.core.sessions.has("a", "first")
    assert asked(talk.hub, box_question(1), "first", 90).text == first_text


@pytest.mark.failure(number=19)
def test_prompt_whose_client_leaves_between_layers_ends_there(
    deep: LoadedModel, talk: Conversation, reading: Pass
) -> None:
    first_text, long_text = texts(deep)
    gate, first = Gate(), Waiting()
    talk.hub.submit(Request("a", tuple(box_question(1)), "first", max_new_tokens=90), first)
    assert awaited(lambda: bool(first.text))
    before = talk.used()
    reading.before(LAYERS + 3, gate.wait)
    with ExitStack() as second:
        body = talk.body(LONG, "long", 3) | {"stream": False}
        http = second.enter_context(httpx2.Client(timeout=httpx2.Timeout(30, read=1)))
        with pytest.raises(httpx2.TimeoutException):
            http.post(f"{talk.url}/v1/chat/completions", json=body)
    assert gate.reached.is_set() and talk.cancelled.wait(30)
    gate.left.set()
    first.wait()
    assert first.text == first_text
    assert reading.layers == LAYERS + 3  # the one that was waited in front of was the last
    assert talk.used() <= before and not talk.hub.context.core.sessions.has("a", "long")
    assert asked(talk.hub, LONG, "long", 3).text == long_text


def test_failing_step_between_layers_stops_no_prompt(
    deep: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that runs out of memory ends its answers alone."""
    _, long_text = texts(deep)
    forward, step = DecoderStack.forward, StepInterruption._before_layer
    is_between, failures = list[bool](), list[int]()

    def failing_forward(stack: DecoderStack, *args: Any, **options: Any) -> Any:
        if is_between and not failures:
            failures.append(1)
            raise MemoryError("no room for a step")
        return forward(stack, *args, **options)

    def between(interruption: StepInterruption) -> None:
        is_between.append(True)
        try:
            step(interruption)
        finally:
            is_between.clear()

    monkeypatch.setattr(DecoderStack, "forward", failing_forward)
    monkeypatch.setattr(StepInterruption, "_before_layer", between)
    with closing(LocalEngineClient(engine(deep), options=PROMPT)) as hub:
        first, second = Waiting(), Waiting()
        hub.submit(Request("a", tuple(box_question(1)), "first", max_new_tokens=90), first)
        hub.submit(Request("a", tuple(LONG), "long", max_new_tokens=3), second)
        second.wait()
        assert first.over.wait(30) and isinstance(first.error, MemoryError)
        assert failures == [1] and second.text == long_text


def test_turn_that_ends_between_layers_on_a_full_disk_is_not_durable(
    deep: LoadedModel, tmp_path: Path, reading: Pass
) -> None:
    plain = Stored(deep, tmp_path / "plain", policy=POLICIES["limited"], tokens=BUDGET, block=BLOCK)
    expected = [
        plain.ask(box_question(1), "first", max_new_tokens=12).text,
        plain.ask(LONG, "long").text,
    ]
    plain.close()
    stored = Stored(
        deep,
        tmp_path / "full",
        policy=POLICIES["limited"],
        tokens=BUDGET,
        block=BLOCK,
        inter_token_seconds=ALWAYS,
    )
    first, _ = stored.served.submit(box_question(1), "first", max_new_tokens=12)
    while not first.text:
        stored.served.step()
    ended = list[bool]()
    reading.before(2 * LAYERS, lambda: ended.append(first.text == expected[0]))
    second, _ = stored.served.submit(LONG, "long")
    with failing(stored.store.sessions, "append", StoreFull("No room.")):
        stored.run()
    assert ended == [True]  # all of its tokens were generated between layers
    assert [first.text, second.text] == expected
    assert (first.result.durable, second.result.durable) == (False, False)
    assert set(stored.disk.stats().unwritten) == {"full"}
    again = stored.ask(box_question(3), "after")
    assert again.result.durable
    stored.close()


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_beside_interrupted_passes_answer_as_alone(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(tiny("qwen3", layers=LAYERS), config).save_pretrained(str(tmp_path))
    own, adapted = with_adapters(characters(layers=LAYERS), {"lora": str(tmp_path)})
    models, lock = {"base": own, "lora": adapted["lora"]}, TurnLock()
    alone = {name: texts(model) for name, model in models.items()}
    assert alone["base"] != alone["lora"]
    clients = {
        name: LocalEngineClient(
            engine(model),
            options=replace(PROMPT, names=(name,)),
            step_lock=lock,
        )
        for name, model in models.items()
    }
    with closing(ModelRouter(clients)) as hub:
        assert answered_at_once({name: hub for name in models}) == alone


@pytest.mark.extended
def test_models_of_two_threads_share_no_tables_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, take_rows = set[int](), step_layout.StepLayout.take_rows

    def noted(layout: step_layout.StepLayout, *args: Any) -> Any:
        threads.add(threading.get_ident())
        return take_rows(layout, *args)

    monkeypatch.setattr(step_layout.StepLayout, "take_rows", noted)
    models = {name: characters(layers=LAYERS) for name in ("base", "other")}
    alone = {name: texts(model) for name, model in models.items()}
    threads.clear()
    with ExitStack() as stack:
        hubs = dict[str, LocalEngineClient]()
        for name, model in models.items():
            hub = LocalEngineClient(engine(model), options=PROMPT)
            hubs[name] = stack.enter_context(closing(hub))
        for _ in range(3):
            assert answered_at_once(hubs) == alone
    assert len(threads) == 2


def answered_at_once(hubs: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """By model, the texts of an answer in progress and of a long prompt, of all models at once."""
    first, second = dict[str, Client](), dict[str, Waiting]()
    for name, hub in hubs.items():
        first[name] = Waiting()
        request = Request("a", tuple(box_question(1)), None, max_new_tokens=90, model=name)
        hub.submit(request, first[name])
        second[name] = Waiting()
        hub.submit(Request("a", tuple(LONG), None, max_new_tokens=3, model=name), second[name])
    for client in (*first.values(), *second.values()):
        assert isinstance(client, Waiting) and client.over.wait(60)
        assert client.result
    return {name: (first[name].text, second[name].text) for name in hubs}
