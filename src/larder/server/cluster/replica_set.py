"""The servers behind one front, whatever runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any

from larder.server.cluster.frames import ErrorFrame, Frame, ResultFrame
from larder.server.request import Request


class ReplicaLost(Exception):
    """A replica has gone before it had told everything."""


class ReplicaSet(ABC):
    """Hubs in other processes, each of which can answer for any session. Safe from any thread.

    The same key leads to the same replica as long as there is it.
    """

    @abstractmethod
    def answer(self, key: str, request: Request) -> AsyncGenerator[Frame, None]:
        """Have a replica answer. Who closes the generator early has the answer cancelled.

        Raises:
            Lost: the replica has gone.
        """

    @abstractmethod
    async def ask(self, key: str, method: str, *given: Any) -> ResultFrame | ErrorFrame:
        """Call a method of a replica's hub.

        Raises:
            Lost: the replica has gone.
        """

    @abstractmethod
    async def ask_all(self, method: str, *given: Any) -> list[ResultFrame | ErrorFrame]:
        """Call it of every replica that there is."""

    @abstractmethod
    def close(self) -> None:
        """Have all of them finish what they answer, and end."""
