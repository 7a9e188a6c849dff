"""What runs in each process behind a front: a hub, and what it says as frames."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from larder.core.errors import LarderError
from larder.server.engine_client import EngineClient
from larder.server.http.error_responses import as_api_error
from larder.server.request import ApiError, Report, Request

THREADS = 32  # that wait for the model's thread at a time
# What may be asked by name.
METHODS = frozenset(EngineClient.__abstractmethods__) - {"submit", "close"}


class Replica:
    """One hub of several.

    Args:
        opened: makes it, and closes it when it is left: what it still answers is cancelled then.
    """

    def __init__(self, opened: Callable[[], AbstractContextManager[EngineClient]]) -> None:
        self._living = ExitStack()
        self._hub = self._living.enter_context(opened())
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="larder replica")

    async def answer(self, request: Request) -> AsyncGenerator[list[Frame], None]:
        """An answer as it comes; whoever stops listening cancels it.

        What has come meanwhile is told together.
        """
        loop, box = asyncio.get_running_loop(), _FrameQueue()
        try:
            ticket = await loop.run_in_executor(self._pool, self._hub.submit, request, box)
        except Exception as error:
            yield [ErrorFrame.of(error)]
            return
        try:
            yield [StartFrame()]
            is_over = False
            while not is_over:
                frames = await box.taken()
                is_over = not isinstance(frames[-1], TextFrame)
                yield frames
        finally:
            ticket.cancel()

    async def ask(self, method: str, *given: Any) -> ResultFrame | ErrorFrame:
        """Call a method of the hub."""
        if method not in METHODS:
            raise ValueError(f"A hub has no method {method!r}.")
        loop = asyncio.get_running_loop()
        try:
            call = getattr(self._hub, method)
            return ResultFrame(await loop.run_in_executor(self._pool, call, *given))
        except Exception as error:
            return ErrorFrame.of(error)

    def check_health(self) -> None:
        """Raises: RuntimeError: the model's thread has died."""
        if not self._hub.is_healthy():
            raise RuntimeError("The model's thread has ended.")

    def close(self) -> None:
        """Give everything back; what was said is kept already."""
        self._living.close()
        self._pool.shutdown(wait=False)

    def __del__(self) -> None:
        self.close()


class _FrameQueue:
    """Hears an answer in the model's thread, for the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()

    def on_text(self, text: str) -> None:
        self._put(TextFrame(text))

    def on_done(self, report: Report) -> None:
        self._put(report)

    def on_error(self, error: Exception) -> None:
        self._put(ErrorFrame.of(error))

    async def taken(self) -> list[Frame]:
        """All that has come; at least one thing."""
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
    """The request was taken."""


@dataclass(frozen=True)
class TextFrame:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True)
class ErrorFrame:
    """There is no answer, or no more of it; the fields are those of `ApiError`."""

    message: str
    status: int
    code: str
    param: str | None = None
    retry_after: float | None = None

    @staticmethod
    def of(error: Exception) -> ErrorFrame:
        """What a client may know of an error; the log has the rest."""
        if not isinstance(error, LarderError):
            LOG.error("A replica has failed.", exc_info=error)
        told = as_api_error(error)
        return ErrorFrame(str(told), told.status, told.code, told.param, told.retry_after)

    @property
    def refusal(self) -> ApiError:
        """The error that it was."""
        return ApiError(self.message, self.status, self.code, self.param, self.retry_after)


@dataclass(frozen=True)
class ResultFrame:
    """What a method of a hub has returned."""

    value: Any


Frame = StartFrame | TextFrame | Report | ErrorFrame


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
