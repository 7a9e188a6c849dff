"""Replica process: an engine client whose answers are sent as frames, and the replica set."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from larder.server.engine_client import EngineClient
from larder.server.http.error_responses import logged_api_error
from larder.server.http.streaming import AnswerQueue
from larder.server.operations import OPERATIONS
from larder.server.request import ApiError, Report, Request, TokenLogprob

THREADS = 32  # that may wait for the model's thread at the same time


class Replica:
    """Engine client in a process of its own.

    Args:
        open_client: context manager of the client; its exit cancels running answers.
    """

    def __init__(self, open_client: Callable[[], AbstractContextManager[EngineClient]]) -> None:
        self._resources = ExitStack()
        self._client = self._resources.enter_context(open_client())
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="larder replica")

    async def answer(self, request: Request) -> AsyncGenerator[list[Frame], None]:
        """Frames of an answer, in batches; closing the generator cancels the request."""
        loop, queue = asyncio.get_running_loop(), AnswerQueue()
        try:
            ticket = await loop.run_in_executor(self._pool, self._client.submit, request, queue)
        except Exception as error:
            yield [logged_api_error(error)]
            return
        try:
            yield [StartFrame()]
            is_over = False
            while not is_over:
                items = await queue.take_all()
                is_over = isinstance(items[-1], Report | Exception)
                yield [logged_api_error(e) if isinstance(e, Exception) else e for e in items]
        finally:
            ticket.cancel()

    async def ask(self, operation: str, *arguments: Any) -> Any:
        """Result of an operation of the engine client, or its `ApiError`."""
        if operation not in OPERATIONS:
            raise ValueError(f"An engine client has no operation {operation!r}.")
        loop, call = asyncio.get_running_loop(), partial(self._client.call, OPERATIONS[operation])
        try:
            return await loop.run_in_executor(self._pool, call, *arguments)
        except Exception as error:
            return logged_api_error(error)

    def check_health(self) -> None:
        """Raise RuntimeError if the model's thread has ended."""
        if not self._client.is_healthy():
            raise RuntimeError("The model's thread has ended.")

    def close(self) -> None:
        """Close the engine client; completed turns are stored already."""
        self._resources.close()
        self._pool.shutdown(wait=False)

    def __del__(self) -> None:
        self.close()


class StartFrame:
    """Frame: the request was accepted."""


# The frames after `StartFrame` are texts and log-probabilities; the last one is the report, or the
# error.
Frame = StartFrame | str | tuple[TokenLogprob, ...] | Report | ApiError


class ReplicaLost(Exception):
    """Replica lost before the end of an answer."""


class ReplicaSet(ABC):
    """Replicas in other processes, each of which can serve any session. Thread-safe.

    A key is routed to the same replica for as long as that lives.
    """

    @abstractmethod
    def answer(self, key: str, request: Request) -> AsyncGenerator[Frame, None]:
        """Frames of a replica's answer; closing the generator early cancels the request.

        Raises:
            ReplicaLost: the replica is gone.
        """

    @abstractmethod
    async def ask(self, key: str, operation: str, *arguments: Any) -> Any:
        """Result of an operation of a replica's engine client, or its `ApiError`.

        Raises:
            ReplicaLost: the replica is gone.
        """

    @abstractmethod
    async def ask_all(self, operation: str, *arguments: Any) -> list[Any]:
        """Results of an operation of every live replica that has one."""

    @abstractmethod
    def close(self) -> None:
        """Let all replicas finish their answers, and stop them."""
