"""Completions endpoint, `POST /v1/completions`: continues raw text without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from larder.server.http.app_state import AppState, app_state
from larder.server.http.chat_completions import StreamOptions
from larder.server.http.error_responses import invalid_field
from larder.server.http.json_route import JsonRoute
from larder.server.http.protocol import (
    ChunkHeader,
    GenerationRequest,
    Stop,
    Text,
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

router = APIRouter(tags=["text"], route_class=JsonRoute)
Texts = Annotated[list[Text], Field(max_length=128, fail_fast=True)]
Ids = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """Text to continue: a string, a list of one string, or token ids."""

    prompt: Text | Texts | Ids | tuple[Ids]
    max_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None


@router.post("/v1/completions")
async def completions(http: HttpRequest, body: CompletionRequest) -> Response:
    """Continue a text, as one body or as a stream."""
    state, hint = app_state(http), request_session_hint(http, app_state(http), body)
    request = engine_request(
        http,
        state,
        body,
        hint.name,
        body.max_tokens,
        stop_strings(body.stop),
        raw_prompt=await run_in_threadpool(_prompt, state, body.prompt),
    )
    answer = await stream_answer(http, state, request, hint.is_firm)
    head = ChunkHeader(new_id("cmpl-"), "text_completion", int(time.time()), body.model)
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_chunks(head, answer, has_usage))
    text, report = await collect_answer(answer)
    fields = {
        "choices": [_choice(text, report.reason)],
        "usage": usage(report),
        "kv": kv_usage(report),
    }
    return JSONResponse(head.with_(fields))


async def _chunks(
    head: ChunkHeader, answer: AnswerStream, has_usage: bool
) -> AsyncGenerator[bytes, None]:
    async for frame in with_pings(answer):
        if isinstance(frame, bytes):
            yield frame
        elif isinstance(frame, str):
            yield sse_event(head.with_({"choices": [_choice(frame)]}))
        else:
            yield sse_event(
                head.with_({"choices": [_choice("", frame.reason)], "kv": kv_usage(frame)})
            )
            if has_usage:
                yield sse_event(
                    head.with_({"choices": [], "usage": usage(frame), "kv": kv_usage(frame)})
                )
            yield DONE


def _choice(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _prompt(state: AppState, prompt: str | list[str] | list[int] | tuple[list[int]]) -> str:
    """Text of the prompt; token ids are detokenized."""
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], int):
        return state.client.detokenize([each for each in prompt if isinstance(each, int)])
    if len(prompt) != 1:
        raise invalid_field(f"prompt has {len(prompt)} texts: send one per request.", "prompt")
    [only] = prompt
    if isinstance(only, list):
        return state.client.detokenize(only)
    return str(only)
