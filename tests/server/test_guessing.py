"""Sessions that a request without a name may mean, some of which cannot be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest

from larder.engine.engine import Engine
from larder.models.loading import Loaded
from larder.server.local_hub import LocalHub
from larder.server.persisting import Persisting
from larder.server.request import Refusal, Request, Turn
from larder.store.blobs import path_of
from larder.store.ledger import Budgets, Tier
from larder.store.store import Store
from server_core import Client, Served, answered, characters, told

SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def other() -> Loaded:
    """Another model, whose tokens are the same."""
    return characters(layers=3)


def keeper_in(folder: Path, loaded: Loaded) -> Persisting:
    store = Store(str(folder / "blobs"), folder / "home", secret=SECRET)
    return Persisting(store, loaded.decoder.spec)


def talk(loaded: Loaded, folder: Path) -> list[Turn]:
    """A conversation that is kept, and what would be said next."""
    served = Served(loaded, keeper=keeper_in(folder, loaded))
    turns = answered(told(1), served.ask(told(1), "x"), "Why?")
    return answered(turns, served.ask(turns, "x"), "Sure?")


def flip(folder: Path, loaded: Loaded) -> None:
    """Damage what was said."""
    record = keeper_in(folder, loaded)._store.turns.of("a")[0]
    assert record.transcript is not None
    file = folder / "blobs" / path_of(record.transcript.digest)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@dataclass
class Waiting(Client):
    """Tells when its answer is over."""

    over: Event = field(default_factory=Event)

    def on_done(self, report: object) -> None:
        super().on_done(report)  # pyright: ignore
        self.over.set()

    def on_error(self, error: Exception) -> None:
        super().on_error(error)
        self.over.set()


@contextmanager
def hub_in(folder: Path, loaded: Loaded, host: int | None = None) -> Iterator[LocalHub]:
    budgets = Budgets({} if host is None else {Tier.HOST: host})
    with closing(
        LocalHub(Engine(loaded, "full"), budgets, keeper=keeper_in(folder, loaded))
    ) as hub:
        yield hub


def ask(hub: LocalHub, turns: list[Turn], name: str | None = None) -> Client:
    client = Waiting()
    hub.submit(Request("a", tuple(turns), name, max_new_tokens=2), client)
    assert client.over.wait(30)
    return client


def test_sessions_of_another_model_are_not_meant(
    small: Loaded, other: Loaded, tmp_path: Path
) -> None:
    turns = talk(small, tmp_path)
    with hub_in(tmp_path, other) as hub:
        assert ask(hub, turns).told.session != "x"
        assert not hub._core.recalling.passed_over
        with pytest.raises(Refusal, match="another model"):
            ask(hub, turns, "x")
    with hub_in(tmp_path, small) as hub:
        assert ask(hub, turns).told.session == "x"


@pytest.mark.parametrize("reason", ["invalid_request", "session_unreadable", "kv_budget_exceeded"])
def test_what_was_only_guessed_refuses_no_request(
    small: Loaded, other: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "larder.server.persisting.MODEL", "unknown", raising=False
        )  # as it was once written
        turns = talk(small, tmp_path)
    if reason == "session_unreadable":
        flip(tmp_path, small)
    loaded = other if reason == "invalid_request" else small
    served = Served(loaded, keeper=keeper_in(tmp_path, loaded))
    if reason == "kv_budget_exceeded":
        monkeypatch.setattr(served.core.tiers, "weigh", lambda sitting: sitting.name != "x")
    assert served.ask(turns).told.session != "x"
    assert served.core.recalling.passed_over == {reason: 1}
    if reason != "kv_budget_exceeded":
        with hub_in(tmp_path, loaded) as hub:
            assert ask(hub, turns).told.session != "x"
            assert hub._core.recalling.passed_over == {reason: 1}


@pytest.mark.parametrize("is_damaged", [True, False])
def test_what_cannot_be_read_can_be_removed(
    small: Loaded, other: Loaded, tmp_path: Path, is_damaged: bool
) -> None:
    talk(small, tmp_path)
    if is_damaged:
        flip(tmp_path, small)
    with hub_in(tmp_path, small if is_damaged else other) as hub:
        with pytest.raises(Refusal):
            hub.session("a", "x")
        hub.remove("a", "x")
        assert hub.sessions("a") == ()
        with pytest.raises(Refusal, match="no session"):
            hub.remove("a", "x")
    assert keeper_in(tmp_path, small).recall("a", "x") is None
