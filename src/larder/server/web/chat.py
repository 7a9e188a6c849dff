"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from larder.server.request import Turn
from larder.server.web.asking import (
    Asked,
    Head,
    Message,
    Stop,
    Tokens,
    hinted,
    kv,
    request,
    stops,
    usage,
)
from larder.server.web.desk import desk_of
from larder.server.web.hearing import DONE, EventStream, Heard, data, framed, listen, whole
from larder.server.web.json_route import JsonRoute
from larder.server.web.naming import new_id

router = APIRouter(tags=["text"], route_class=JsonRoute)


class StreamOptions(BaseModel):
    """What a stream holds beside text."""

    include_usage: bool = False


class ChatAsked(Asked):
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None

    def turns(self) -> tuple[Turn, ...]:
        """The messages as ours."""
        return tuple(message.turn() for message in self.messages)


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest, asked: ChatAsked) -> Response:
    """Answer a conversation, in one piece or as it comes."""
    desk, hint = desk_of(http), hinted(http, desk_of(http), asked)
    longest = asked.max_completion_tokens or asked.max_tokens
    turns = await run_in_threadpool(asked.turns)
    wanted = request(http, desk, asked, hint.name, longest, stops(asked.stop), turns)
    heard = await listen(http, desk, wanted, hint.is_firm)
    kind = "chat.completion.chunk" if asked.stream else "chat.completion"
    head = Head(new_id("chatcmpl-"), kind, int(time.time()), asked.model)
    if asked.stream:
        has_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return EventStream(_chunks(head, heard, has_usage))
    text, report = await whole(heard)
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": report.reason}
    return JSONResponse(head.with_({"choices": [choice], "usage": usage(report), "kv": kv(report)}))


async def _chunks(head: Head, heard: Heard, has_usage: bool) -> AsyncGenerator[bytes, None]:
    yield data(head.with_({"choices": [_delta({"role": "assistant", "content": ""})]}))
    async for frame in framed(heard):
        if isinstance(frame, bytes):
            yield frame
        elif isinstance(frame, str):
            yield data(head.with_({"choices": [_delta({"content": frame})]}))
        else:
            yield data(head.with_({"choices": [_delta({}, frame.reason)], "kv": kv(frame)}))
            if has_usage:
                yield data(head.with_({"choices": [], "usage": usage(frame), "kv": kv(frame)}))
            yield DONE


def _delta(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
