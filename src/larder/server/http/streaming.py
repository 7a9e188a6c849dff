"""An answer on its way from the model's thread to one client, who may leave at any time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from larder.core.errors import LarderError
from larder.server.engine_client import EngineClient
from larder.server.http.app_state import AppState
from larder.server.http.error_responses import as_api_error, error_body
from larder.server.request import ApiError, Report, Request, Ticket

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
UNICODE_LINE_BREAKS = "\u0085\u2028\u2029"  # ends of lines to some who read lines, but not to JSON
LOG = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499  # what logs call a client that did not wait


class ClientClosedRequest(Exception):
    """The client has left."""


@dataclass(frozen=True)
class StreamIdle:
    """Nothing has come for a while."""


AnswerStream = AsyncGenerator[str | Report | StreamIdle, None]


class AnswerQueue:
    """Hears an answer in the model's thread and hands it to the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[str | Report | Exception] = asyncio.Queue()

    def on_text(self, text: str) -> None:
        self.put(text)

    def on_done(self, report: Report) -> None:
        self.put(report)

    def on_error(self, error: Exception) -> None:
        self.put(error)

    def put(self, item: str | Report | Exception) -> None:
        """Hand something over, from any thread; once the loop is closed nobody reads it."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            pass

    async def take(self, seconds: float) -> str | Report | Exception | StreamIdle:
        """The next item, or silence."""
        try:
            return await asyncio.wait_for(self._items.get(), seconds)
        except TimeoutError:
            return StreamIdle()


async def stream_answer(
    http: HttpRequest, desk: AppState, asked: Request, is_firm: bool = True
) -> AnswerStream:
    """Submit a request and wait until its answer begins, or a ping is due.

    Args:
        is_firm: the session named is the only one that will do; else a busy one is passed by.

    Raises:
        Refusal: it is refused, at once or before anything of the answer was there.
        Gone: the client has left meanwhile.
    """
    mailbox = AnswerQueue()
    ticket = await run_in_threadpool(_submit, desk.hub, asked, mailbox, is_firm)
    heard = _receive(http, desk, mailbox, ticket)
    try:
        first = await anext(heard)
    except BaseException:
        await heard.aclose()
        raise
    return _chain(first, heard)


async def collect_answer(heard: AnswerStream) -> tuple[str, Report]:
    """The complete text of an answer, and what it took."""
    pieces: list[str] = []
    async for item in heard:
        if isinstance(item, Report):
            return "".join(pieces), item
        if isinstance(item, str):
            pieces.append(item)
    raise ClientClosedRequest


async def with_pings(heard: AnswerStream) -> AsyncGenerator[str | Report | bytes, None]:
    """The rest of an answer with silences as comments; an error is the last event.

    Raises:
        Gone: the client has left.
    """
    try:
        async for item in heard:
            yield PING if isinstance(item, StreamIdle) else item
    except LarderError as error:
        yield sse_event(error_body(as_api_error(error)))


def sse_event(content: dict[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    named = "" if event is None else f"event: {event}\n"
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for sign in UNICODE_LINE_BREAKS:
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f"{named}data: {text}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """Server-sent events.

    Args:
        frames: closed when the client has left or everything is sent.
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


def _submit(hub: EngineClient, asked: Request, mailbox: AnswerQueue, is_firm: bool) -> Ticket:
    try:
        return hub.submit(asked, mailbox)
    except ApiError as refusal:
        if is_firm or refusal.code != "session_busy":
            raise
    return hub.submit(replace(asked, session=None), mailbox)


async def _receive(
    http: HttpRequest, desk: AppState, mailbox: AnswerQueue, ticket: Ticket
) -> AnswerStream:
    """Everything that is told; whoever stops listening cancels."""
    watching = asyncio.create_task(_watch(http, mailbox))
    try:
        while True:
            item = await mailbox.take(desk.settings.ping_seconds)
            if isinstance(item, Exception):
                raise as_client_error(item)
            if isinstance(item, Report) and item.reason == "cancelled":
                raise ApiError("The server is stopping: ask again.", 503, "stopping", None, 1.0)
            if isinstance(item, Report):
                desk.gauges.observe(item)
            yield item
            if isinstance(item, Report):
                return
    finally:
        watching.cancel()
        ticket.cancel()


async def _watch(http: HttpRequest, mailbox: AnswerQueue) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    mailbox.put(ClientClosedRequest())


def as_client_error(error: Exception) -> Exception:
    """An error of ours or of the client; others are put into the log and told as a refusal."""
    if isinstance(error, LarderError | ClientClosedRequest):
        return error
    LOG.error("An answer has failed.", exc_info=error)
    return as_api_error(error)


async def _chain(first: str | Report | StreamIdle, rest: AnswerStream) -> AnswerStream:
    async with aclosing(rest) as others:
        yield first
        async for item in others:
            yield item
