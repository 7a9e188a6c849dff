"""Replicas in this process that a test can stop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from larder import Engine
from larder.models import LoadedModel
from larder.server import (
    EngineClient,
    Frame,
    LeasedSessionLocks,
    LocalEngineClient,
    Replica,
    ReplicaLost,
    ReplicaSet,
    Request,
    SessionLeases,
    StoreSessionPersistence,
)
from larder.store import Store

SECRET = b"s" * 32


class LocalReplicas(ReplicaSet):
    """Some replicas; a key leads to one of those that are left.

    `breaks` says behind how many pieces of text the next answer is lost, with its replica or
    without; `went` which replica each answer went to.
    """

    def __init__(self, loaded: LoadedModel, folder: Path, count: int) -> None:
        self.stores = [
            Store(str(folder / "blobs"), folder / f"home {n}", secret=SECRET) for n in range(count)
        ]
        opened = [lambda store=store: _hub(loaded, store) for store in self.stores]
        self.left = {number: Replica(each) for number, each in enumerate(opened)}
        self.breaks: int | None = None
        self.went: list[int] = []

    def lose(self, number: int) -> None:
        """A replica is gone, without a word."""
        self.left.pop(number).close()

    def place(self, key: str) -> int:
        return sorted(self.left)[int(key[:8], 16) % len(self.left)]

    async def answer(self, key: str, request: Request) -> AsyncGenerator[Frame, None]:
        if not self.left:
            raise ReplicaLost("nobody is left")
        number = self.place(key)
        self.went.append(number)
        async with aclosing(self.left[number].answer(request)) as result:
            async for frames in result:
                for frame in frames:
                    self._count(number, frame)
                    yield frame

    def _count(self, number: int, frame: Frame) -> None:
        if isinstance(frame, str) and self.breaks is not None:
            self.breaks -= 1
            if self.breaks < 0:
                self.breaks = None
                self.left.pop(number)
                raise ReplicaLost("pulled the plug")

    async def ask(self, key: str, method: str, *args: Any) -> Any:
        if not self.left:
            raise ReplicaLost("nobody is left")
        return await self.left[self.place(key)].ask(method, *args)

    async def ask_all(self, method: str, *args: Any) -> list[Any]:
        result = [await each.ask(method, *args) for each in self.left.values()]
        return [each for each in result if not isinstance(each, Exception)]

    def close(self) -> None:
        for number in list(self.left):
            self.lose(number)
        for store in self.stores:
            store.close()


@contextmanager
def _hub(loaded: LoadedModel, store: Store) -> Iterator[EngineClient]:
    locks = LeasedSessionLocks(store, SessionLeases(store.parts))
    persistence = StoreSessionPersistence(store, loaded.decoder.spec, locks)
    hub = LocalEngineClient(Engine(loaded, policy="full"), persistence=persistence)
    try:
        yield hub
    finally:
        hub.close()
