"""What runs in each process behind a front: a hub, and what it says as frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from larder.server.cluster.frames import ErrorFrame, Frame, ResultFrame, StartFrame, TextFrame
from larder.server.engine_client import EngineClient
from larder.server.request import Report, Request

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
