"""Replica process: an engine client whose answers are sent as frames, and the replica set."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from larder.core.errors import LarderError
from larder.server.engine_client import EngineClient
from larder.server.http.error_responses import as_api_error
from larder.server.operations import OPERATIONS
from larder.server.request import ApiError, Report, Request

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
        loop, queue = asyncio.get_running_loop(), _FrameQueue()
        try:
            ticket = await loop.run_in_executor(self._pool, self._client.submit, request, queue)
        except Exception as error:
            yield [ErrorFrame.of(error)]
            return
        try:
            yield [StartFrame()]
            is_over = False
            while not is_over:
                frames = await queue.take()
                is_over = not isinstance(frames[-1], TextFrame)
                yield frames
        finally:
            ticket.cancel()

    async def ask(self, operation: str, *arguments: Any) -> ResultFrame | ErrorFrame:
        """Run an operation of the engine client."""
        if operation not in OPERATIONS:
            raise ValueError(f"An engine client has no operation {operation!r}.")
        loop, call = asyncio.get_running_loop(), partial(self._client.call, OPERATIONS[operation])
        try:
            return ResultFrame(await loop.run_in_executor(self._pool, call, *arguments))
        except Exception as error:
            return ErrorFrame.of(error)

    def check_health(self) -> None:
        """Raises: RuntimeError: the model's thread has died."""
        if not self._client.is_healthy():
            raise RuntimeError("The model's thread has ended.")

    def close(self) -> None:
        """Close the engine client; completed turns are stored already."""
        self._resources.close()
        self._pool.shutdown(wait=False)

    def __del__(self) -> None:
        self.close()


class _FrameQueue:
    """Listener that passes an answer from the model's thread to the event loop as frames."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()

    def on_text(self, text: str) -> None:
        self._put(TextFrame(text))

    def on_done(self, report: Report) -> None:
        self._put(report)

    def on_error(self, error: Exception) -> None:
        self._put(ErrorFrame.of(error))

    async def take(self) -> list[Frame]:
        """All waiting frames; waits for at least one."""
        frames = [await self._frames.get()]
        while not self._frames.empty():
            frames.append(self._frames.get_nowait())
        return frames

    def _put(self, frame: Frame) -> None:
        try:
            self._loop.call_soon_threadsafe(self._frames.put_nowait, frame)
        except RuntimeError:
            pass


LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartFrame:
    """Frame: the request was accepted."""


@dataclass(frozen=True)
class TextFrame:
    """Frame: the next text of the answer."""

    text: str


@dataclass(frozen=True)
class ErrorFrame:
    """Frame: the answer failed; the fields are those of `ApiError`."""

    message: str
    status: int
    code: str
    param: str | None = None
    retry_after: float | None = None

    @staticmethod
    def of(error: Exception) -> ErrorFrame:
        """Frame of an exception, without internal details; those are logged."""
        if not isinstance(error, LarderError):
            LOG.error("A replica has failed.", exc_info=error)
        refusal = as_api_error(error)
        return ErrorFrame(
            str(refusal), refusal.status, refusal.code, refusal.param, refusal.retry_after
        )

    @property
    def refusal(self) -> ApiError:
        """Error as an exception."""
        return ApiError(self.message, self.status, self.code, self.param, self.retry_after)


@dataclass(frozen=True)
class ResultFrame:
    """Result of an operation of the engine client."""

    value: Any


Frame = StartFrame | TextFrame | Report | ErrorFrame


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
    async def ask(self, key: str, operation: str, *arguments: Any) -> ResultFrame | ErrorFrame:
        """Run an operation of a replica's engine client.

        Raises:
            ReplicaLost: the replica is gone.
        """

    @abstractmethod
    async def ask_all(self, operation: str, *arguments: Any) -> list[ResultFrame | ErrorFrame]:
        """Run an operation of every live replica."""

    @abstractmethod
    def close(self) -> None:
        """Let all replicas finish their answers, and stop them."""
