"""Stream of an answer from the model's thread to one client, which may disconnect at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from larder.server.api_errors import server_stopping
from larder.server.engine_client import EngineClient
from larder.server.http.app_state import AppState, arrival_of
from larder.server.http.error_responses import logged_api_error
from larder.server.request import ApiError, Report, Request, Ticket, TokenLogprob

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
UNICODE_LINE_BREAKS = "\u0085\u2028\u2029"  # line breaks for some readers, but not in JSON
CLIENT_CLOSED_REQUEST = 499  # nginx's status of a client that disconnected

Item = TypeVar("Item")


class ClientClosedRequest(Exception):
    """Client disconnected before the end of its answer."""


@dataclass(frozen=True)
class StreamIdle:
    """Item of a stream that was idle for the ping interval."""


@dataclass(frozen=True)
class CompleteAnswer:
    """Answer that is complete: its text, its report, and log-probabilities if they are wanted."""

    text: str
    report: Report
    logprobs: tuple[TokenLogprob, ...] = ()


Logprobs = tuple[TokenLogprob, ...]  # of tokens whose text comes next
AnswerStream = AsyncGenerator[str | Logprobs | Report | StreamIdle, None]


class AnswerQueue:
    """Listener that passes an answer from the model's thread to the event loop that created it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[str | Logprobs | Report | Exception] = asyncio.Queue()

    def on_text(self, text: str) -> None:
        self.put(text)

    def on_logprobs(self, logprobs: Logprobs) -> None:
        self.put(logprobs)

    def on_done(self, report: Report) -> None:
        self.put(report)

    def on_error(self, error: Exception) -> None:
        self.put(error)

    def put(self, item: str | Logprobs | Report | Exception) -> None:
        """Enqueue an item from any thread; dropped once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            pass

    async def take(self, seconds: float) -> str | Logprobs | Report | Exception | StreamIdle:
        """Next item, or StreamIdle after `seconds`."""
        try:
            return await asyncio.wait_for(self._items.get(), seconds)
        except TimeoutError:
            return StreamIdle()

    async def take_all(self) -> list[str | Logprobs | Report | Exception]:
        """All waiting items; waits for at least one."""
        items = [await self._items.get()]
        while not self._items.empty():
            items.append(self._items.get_nowait())
        return items


async def stream_answer(
    http: HttpRequest, state: AppState, request: Request, is_firm: bool = True
) -> AnswerStream:
    """Submit a request and wait until its answer starts, or a ping is due.

    Args:
        is_firm: the named session is required; else another one is used if it is busy.

    Raises:
        ApiError: the request is refused before the answer starts.
        ClientClosedRequest: the client disconnected.
    """
    queue = AnswerQueue()
    submission = asyncio.ensure_future(
        run_in_threadpool(_submit, state.client, request, queue, is_firm)
    )
    try:
        ticket = await asyncio.shield(submission)
    except asyncio.CancelledError:  # the thread continues, and nobody would cancel its ticket
        submission.add_done_callback(_cancel_ticket)
        raise
    finally:
        arrival_of(http).end()
    answer = _receive(http, state, queue, ticket)
    try:
        first = await anext(answer)
    except BaseException:
        await answer.aclose()
        raise
    return chain_stream(first, answer)


async def collect_answer(answer: AnswerStream) -> CompleteAnswer:
    """The complete answer of a stream."""
    parts, logprobs = list[str](), list[TokenLogprob]()
    async for item in answer:
        if isinstance(item, Report):
            return CompleteAnswer("".join(parts), item, tuple(logprobs))
        if isinstance(item, str):
            parts.append(item)
        elif isinstance(item, tuple):
            logprobs += item
    raise ClientClosedRequest


def sse_event(content: dict[str, Any], event: str | None = None) -> bytes:
    """Encoded server-sent event."""
    prefix = "" if event is None else f"event: {event}\n"
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for sign in UNICODE_LINE_BREAKS:
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f"{prefix}data: {text}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """Response of server-sent events.

    Args:
        frames: encoded events; closed at the end, or when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for frame in frames:
                    await _send(send, frame, is_last=False)
            except ClientClosedRequest:
                return
            await _send(send, b"", is_last=True)


async def _send(send: Send, frame: bytes, is_last: bool) -> None:
    await send({"type": "http.response.body", "body": frame, "more_body": not is_last})


def _submit(client: EngineClient, request: Request, queue: AnswerQueue, is_firm: bool) -> Ticket:
    try:
        return client.submit(request, queue)
    except ApiError as refusal:
        if is_firm or refusal.code != "session_busy":
            raise
    return client.submit(replace(request, session=None), queue)


def _cancel_ticket(submission: asyncio.Future[Ticket]) -> None:
    if not submission.cancelled() and submission.exception() is None:
        submission.result().cancel()


async def _receive(
    http: HttpRequest, state: AppState, queue: AnswerQueue, ticket: Ticket
) -> AnswerStream:
    """Items of an answer; closing the generator cancels the request."""
    watcher = asyncio.create_task(_watch(http, queue))
    try:
        while True:
            try:
                item = await queue.take(state.settings.ping_seconds)
            except asyncio.CancelledError:  # the server stops before the answer ends
                raise server_stopping() from None
            if isinstance(item, ClientClosedRequest):
                raise item
            if isinstance(item, Exception):
                raise logged_api_error(item)
            if isinstance(item, Report) and item.reason == "cancelled":
                raise server_stopping()
            if isinstance(item, Report):
                state.metrics.observe(item)
            yield item
            if isinstance(item, Report):
                return
    finally:
        watcher.cancel()
        ticket.cancel()


async def _watch(http: HttpRequest, queue: AnswerQueue) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    queue.put(ClientClosedRequest())


async def chain_stream(
    first: Item, items: AsyncGenerator[Item, None]
) -> AsyncGenerator[Item, None]:
    """Stream of an item that was read ahead, and of the others."""
    async with aclosing(items) as others:
        yield first
        async for item in others:
            yield item
