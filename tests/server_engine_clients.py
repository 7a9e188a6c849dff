"""Hubs over a store in a folder, and clients that wait for their answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest

from larder import Engine
from larder.core import StoreError, StoreSlow
from larder.models import LoadedModel
from larder.server import (
    ChatMessage,
    EngineOptions,
    LocalEngineClient,
    Report,
    Request,
    StoreSessionPersistence,
)
from larder.store import ByteBudgets, Store, Tier, blob_path
from server_core import Client

SECRET = b"s" * 32
SLOW = StoreSlow("The disk is slow: check it.")


def persistence_in(folder: Path, loaded: LoadedModel) -> StoreSessionPersistence:
    store = Store(str(folder / "blobs"), folder / "home", secret=SECRET)
    return StoreSessionPersistence(store, loaded.decoder.spec)


def flip(folder: Path, loaded: LoadedModel, name: str = "x") -> None:
    """Damage the stored transcript of a session."""
    heads = persistence_in(folder, loaded)._store.sessions.indexed_heads("a")
    [record] = [each for each in heads if each.name == name]
    assert record.transcript is not None
    file = folder / "blobs" / blob_path(record.transcript.digest)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@dataclass
class Waiting(Client):
    """Client that signals the end of its answer."""

    over: Event = field(default_factory=Event)

    def on_done(self, report: object) -> None:
        super().on_done(report)  # pyright: ignore
        self.over.set()

    def on_error(self, error: Exception) -> None:
        super().on_error(error)
        self.over.set()

    def wait(self) -> Report:
        """Report of the answer, which must have no log-probabilities."""
        assert self.over.wait(60) and not self.logprobs
        return self.result


@contextmanager
def hub_in(
    folder: Path, loaded: LoadedModel, host: int | None = None, policy: str = "full"
) -> Iterator[LocalEngineClient]:
    budget, block = (None, None) if policy == "full" else ("32", 16)
    engine = Engine(loaded, policy=policy, budget=budget, block=block)
    budgets = ByteBudgets({} if host is None else {Tier.HOST: host})
    with closing(
        LocalEngineClient(
            engine, EngineOptions(budgets), persistence=persistence_in(folder, loaded)
        )
    ) as hub:
        yield hub


def ask(
    hub: LocalEngineClient,
    turns: list[ChatMessage],
    name: str | None = None,
    new: int = 2,
    **options: object,
) -> Client:
    client = Waiting()
    request = Request("a", tuple(turns), name, max_new_tokens=new, **options)  # pyright: ignore
    hub.submit(request, client)
    assert client.over.wait(30)
    return client


@contextmanager
def unacknowledged(persistence: StoreSessionPersistence, method: str = "append") -> Iterator[None]:
    """Context in which writes succeed but are reported as slow."""
    turns = persistence._store.sessions
    write = getattr(turns, method)

    def late(*args: object) -> None:
        write(*args)
        raise SLOW

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, method, late)
        yield


@contextmanager
def failing(part: object, method: str, error: StoreError) -> Iterator[None]:
    """While nothing of this comes about."""

    def fail(*args: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, method, fail)
        yield
