"""Chat completions endpoint, `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from larder.server.http.app_state import app_state
from larder.server.http.json_route import JsonRoute
from larder.server.http.protocol import (
    ChunkHeader,
    GenerationRequest,
    InputMessage,
    Stop,
    Tokens,
    engine_request,
    kv_usage,
    request_session_hint,
    stop_strings,
    usage,
)
from larder.server.http.session_hint import new_id
from larder.server.http.streaming import (
    DONE,
    AnswerStream,
    EventStream,
    collect_answer,
    sse_event,
    stream_answer,
    with_pings,
)
from larder.server.request import ChatMessage

router = APIRouter(tags=["text"], route_class=JsonRoute)


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class ChatCompletionRequest(GenerationRequest):
    """A conversation to continue."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None

    def turns(self) -> tuple[ChatMessage, ...]:
        """Messages in the form of the engine."""
        return tuple(message.turn() for message in self.messages)


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, as one body or as a stream."""
    state, hint = app_state(http), request_session_hint(http, app_state(http), body)
    max_new_tokens = body.max_completion_tokens or body.max_tokens
    turns = await run_in_threadpool(body.turns)
    request = engine_request(
        http, state, body, hint.name, max_new_tokens, stop_strings(body.stop), turns
    )
    answer = await stream_answer(http, state, request, hint.is_firm)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = ChunkHeader(new_id("chatcmpl-"), kind, int(time.time()), body.model)
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_chunks(head, answer, has_usage))
    text, report = await collect_answer(answer)
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": report.reason}
    return JSONResponse(
        head.with_({"choices": [choice], "usage": usage(report), "kv": kv_usage(report)})
    )


async def _chunks(
    head: ChunkHeader, answer: AnswerStream, has_usage: bool
) -> AsyncGenerator[bytes, None]:
    yield sse_event(head.with_({"choices": [_delta({"role": "assistant", "content": ""})]}))
    async for frame in with_pings(answer):
        if isinstance(frame, bytes):
            yield frame
        elif isinstance(frame, str):
            yield sse_event(head.with_({"choices": [_delta({"content": frame})]}))
        else:
            yield sse_event(
                head.with_({"choices": [_delta({}, frame.reason)], "kv": kv_usage(frame)})
            )
            if has_usage:
                yield sse_event(
                    head.with_({"choices": [], "usage": usage(frame), "kv": kv_usage(frame)})
                )
            yield DONE


def _delta(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
