"""Engine client in the server's process: concurrency, cancellation and shutdown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from larder import Engine
from larder.core import StoreFull
from larder.models import LoadedModel
from larder.server import (
    ApiError,
    ChatMessage,
    EngineOptions,
    LocalEngineClient,
    Report,
    Request,
    StoreSessionPersistence,
    Ticket,
    TranscriptTexts,
)
from larder.server.persistence import session_file
from larder.store import ByteBudgets, Store, Tier
from server_core import Served, box_question, user
from server_engine_clients import Waiting


@pytest.fixture
def hub(small: LoadedModel) -> Iterator[LocalEngineClient]:
    served = LocalEngineClient(
        Engine(small, policy="full"), EngineOptions(ByteBudgets({Tier.DEVICE: 2_000_000}))
    )
    yield served
    served.close()


def ask(
    hub: LocalEngineClient, turns: list[ChatMessage], session: str, new: int = 3
) -> tuple[Waiting, Ticket]:
    client = Waiting()
    request = Request("a", tuple(turns), session, max_new_tokens=new)
    return client, hub.submit(request, client)


def test_concurrent_clients_are_answered(hub: LocalEngineClient) -> None:
    reports: dict[int, Report] = {}

    def talk(number: int) -> None:
        reports[number] = ask(hub, box_question(number, 1), f"n{number}")[0].wait()

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {report.session for report in reports.values()} == {f"n{n}" for n in range(6)}
    stats = hub.stats()
    assert stats.done == {"length": 6} and stats.new_tokens == 18 and stats.sessions == {"idle": 6}
    assert stats.budget_violations == 0 and 0 < stats.tier_bytes["device"] <= 2_000_000
    assert stats.budget_bytes == {"device": 2_000_000} and stats.steps <= 18


def test_failed_pin_write_leaves_the_session_unpinned(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise StoreFull("The disk is full: remove something.")

    store = Store(str(tmp_path / "blobs"), tmp_path / "home")
    with closing(
        LocalEngineClient(
            Engine(small, policy="full"),
            persistence=StoreSessionPersistence(store, small.decoder.spec),
        )
    ) as hub:
        ask(hub, box_question(1), "x")[0].wait()
        with monkeypatch.context() as patch:
            patch.setattr(store.sessions, "label", full)
            with pytest.raises(ApiError, match="try again") as refused:
                hub.pin("a", "x")
        assert refused.value.status == 503 and not hub.session("a", "x").view.pinned
        assert hub.pin("a", "x").pinned
        store.sessions.label("a", "x", {"pinned": "no"}, 2)  # as another server does
        with pytest.raises(ApiError, match="continued by another server"):
            hub.unpin("a", "x")
        assert hub.session("a", "x").view.pinned


def test_ticket_cancels_a_running_answer(hub: LocalEngineClient) -> None:
    client, ticket = ask(hub, box_question(1), "x", new=1000)
    ticket.cancel()
    assert client.wait().reason == "cancelled"
    ticket.cancel()
    assert hub.sessions("a") == () and hub.stats().tier_bytes["device"] == 0


def test_sessions_are_managed_by_name(hub: LocalEngineClient) -> None:
    ask(hub, box_question(1), "x")[0].wait()
    assert hub.pin("a", "x").pinned and not hub.unpin("a", "x").pinned
    fork = hub.fork("a", "x", "y")
    assert fork.turns == 2 and fork.tier == "none" and hub.compact("a", "x").tier == "device"
    kept = hub.kept("a", "x")
    [[first, _], _] = kept.layers
    assert first == tuple(range(kept.tokens))
    assert "Box 7 holds" in "".join(kept.texts) and len(kept.texts) >= kept.tokens
    turns = hub.session("a", "x")
    assert [turn.role for turn in turns.turns] == ["user", "assistant"]
    assert turns.spans[-1][1] == turns.view.tokens
    assert hub.release("a", "x").tier_bytes["device"] == 0
    assert hub.prefetch("a", "x").tier == "none"
    hub.import_("a", "z", hub.export("a", "x"))
    hub.remove("a", "x")
    assert sorted(view.name for view in hub.sessions("a")) == ["y", "z"]
    assert hub.sessions("b") == ()
    for name in ("x", "unacknowledged of"):
        with pytest.raises(ApiError) as caught:
            hub.session("a", name)
        assert caught.value.code == "session_not_found"
    with pytest.raises(ApiError) as caught:
        hub.open("a", "y")
    assert caught.value.code == "session_exists"


def test_branches_are_removed_with_a_session_on_request(hub: LocalEngineClient) -> None:
    def branched(name: str) -> tuple[str, ...]:
        ask(hub, box_question(1), name)[0].wait()
        made = [ask(hub, box_question(number), name)[0].wait().session for number in (2, 3)]
        hub.fork("a", name, f"{name} of one's own")
        return tuple(made)

    assert branched("x") == ("x~2", "x~3")
    assert hub.remove("a", "x") == ("x~2", "x~3")
    assert hub.remove("a", "x~2") == ()
    assert branched("y") == ("y~2", "y~3")
    assert hub.remove("a", "y", branches=True) == ()
    there = {view.name for view in hub.sessions("a")}
    assert there == {"x~3", "x of one's own", "y of one's own"}


def test_removal_with_a_busy_branch_removes_nothing(hub: LocalEngineClient) -> None:
    for number in (1, 2):
        ask(hub, box_question(number), "x")[0].wait()
    _, ticket = ask(hub, box_question(3), "x~2", new=1000)
    with pytest.raises(ApiError) as caught:
        hub.remove("a", "x", branches=True)
    assert caught.value.code == "session_busy"
    assert {"x", "x~2"} <= {view.name for view in hub.sessions("a")}
    ticket.cancel()


def test_kept_view_does_not_move_caches(hub: LocalEngineClient) -> None:
    ask(hub, box_question(1), "x")[0].wait()
    before, core = hub.kept("a", "x"), hub.context.core
    assert hub.context.thread.call(lambda: core.tiers.offload(core.find("a", "x")))
    held = hub.kept("a", "x")
    assert (before.tier, held.tier) == ("device", "host") and held.tokens > 0
    assert (held.layers, held.texts) == (before.layers, before.texts)
    stats = hub.stats()
    assert stats.tier_bytes["device"] == 0 < stats.tier_bytes["host"] and not stats.restored
    hub.release("a", "x")
    assert hub.kept("a", "x").tokens == 0 and hub.kept("a", "x").tier == "none"


def test_tokenize_and_detokenize_round_trip(hub: LocalEngineClient) -> None:
    assert hub.detokenize(hub.tokenize("Box 7.")) == "Box 7."
    with pytest.raises(ApiError, match="vocabulary"):
        hub.detokenize([5, 4000])
    [model] = hub.models()
    assert model.name == "characters" and model.context_tokens == 4096


def test_character_of_several_tokens_appears_once() -> None:
    raw = "Aé€𝄞z".encode()
    pieces = TranscriptTexts(lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert pieces.texts(raw) == ("A", "", "é", "", "", "€", "", "", "", "𝄞", "z")
    assert pieces.texts(raw[:2] + b"z") == ("A", "\ufffd", "z")


def test_text_beyond_the_context_length_is_not_tokenized(
    hub: LocalEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("the model's thread is kept from others")

    monkeypatch.setattr(type(hub.context.core.engine.tokenizer), "encode", fail)
    monkeypatch.setattr(type(hub.context.core.engine.tokenizer), "render_messages", fail)
    text = "x" * (64 * 4096 + 1)
    with pytest.raises(ApiError) as caught:
        ask(hub, [user(text)], "x")
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ApiError):
        hub.tokenize(text)


def test_close_cancels_running_requests_and_refuses_new_ones(
    hub: LocalEngineClient,
) -> None:
    client, _ = ask(hub, box_question(1), "x", new=1000)
    hub.close()
    assert client.wait().reason == "cancelled" and not hub.is_healthy()
    with pytest.raises(ApiError) as caught:
        ask(hub, [user("Why?")], "x")
    assert caught.value.status == 503


def test_imports_and_exports_run_off_the_model_thread(
    small: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[tuple[str, str]]()

    def watched(name: str) -> None:
        own = getattr(session_file, name)

        def call(*args: object) -> object:
            threads.append((name, threading.current_thread().name))
            return own(*args)

        monkeypatch.setattr(session_file, name, call)

    for each in ("decode", "encode"):
        watched(each)
    keepers = []
    for _ in range(2):  # the second finds the session in the store
        keepers.append(
            StoreSessionPersistence(
                Store(str(tmp_path / "blobs"), tmp_path / "home"), small.decoder.spec
            )
        )
        hub = LocalEngineClient(Engine(small, policy="full"), persistence=keepers[-1])
        if len(keepers) == 1:
            ask(hub, box_question(1), "x")[0].wait()
        else:
            hub.import_("a", "y", hub.export("a", "x"))
        hub.close()
    assert [name for name, _ in threads] == ["encode", "decode", "encode", "decode", "encode"]
    assert "larder model" not in {thread for _, thread in threads}


def test_matched_stop_string_is_reported(small: LoadedModel) -> None:
    served = Served(small)
    whole = served.ask(box_question(1), max_new_tokens=6)
    assert whole.result.matched_stop is None
    stops = (whole.text[3], whole.text[2:4], "not in it")
    cut = served.ask(box_question(1), max_new_tokens=6, stop=stops)
    first = min(stops[:2], key=lambda stop: (whole.text.find(stop), stop))
    assert cut.result.matched_stop == first
    assert cut.text == whole.text[: whole.text.find(first)]
