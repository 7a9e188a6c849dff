"""Completion endpoints: `POST /v1/chat/completions` continues a conversation, `POST
/v1/completions` continues raw text without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from larder.server.api_errors import invalid_request
from larder.server.http.app_state import AppState, app_state
from larder.server.http.json_route import JsonRoute
from larder.server.http.protocol import (
    GenerationRequest,
    InputMessage,
    Stop,
    Text,
    Tokens,
    engine_request,
    kv_usage,
    new_id,
    session_hint,
    stop_strings,
    usage,
)
from larder.server.http.streaming import (
    DONE,
    AnswerStream,
    EventStream,
    collect_answer,
    sse_event,
    stream_answer,
    with_pings,
)
from larder.server.request import ChatMessage, Request

router = APIRouter(tags=["text"], route_class=JsonRoute)
Texts = Annotated[list[Text], Field(max_length=128, fail_fast=True)]
Ids = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class AnswerRequest(GenerationRequest):
    """Fields of both endpoints."""

    max_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None


class ChatCompletionRequest(AnswerRequest):
    """A conversation to continue."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Tokens | None = None

    def turns(self) -> tuple[ChatMessage, ...]:
        """Messages in the form of the engine."""
        return tuple(message.turn() for message in self.messages)


class CompletionRequest(AnswerRequest):
    """Text to continue: a string, a list of one string, or token ids."""

    prompt: Text | Texts | Ids | tuple[Ids]


@dataclass(frozen=True)
class AnswerFormat:
    """JSON of an answer at one endpoint.

    Args:
        prefix: of the answer's id.
        object: type of a whole answer.
        chunk_object: type of a streamed part.
        choice: choice of a whole answer, from its text and finish reason.
        chunk: choice of a part: of its text, or of the finish reason at the end.
        opening: choice of the part before the text, if there is one.
    """

    prefix: str
    object: str
    chunk_object: str
    choice: Callable[[str, str], dict[str, Any]]
    chunk: Callable[[str | None, str | None], dict[str, Any]]
    opening: dict[str, Any] | None = None


def _choice(reason: str | None, **content: Any) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def _message_choice(text: str, reason: str) -> dict[str, Any]:
    return _choice(reason, message={"role": "assistant", "content": text, "refusal": None})


def _delta_choice(text: str | None, reason: str | None) -> dict[str, Any]:
    return _choice(reason, delta={} if text is None else {"content": text})


def _text_choice(text: str | None, reason: str | None) -> dict[str, Any]:
    return _choice(reason, text=text or "")


CHAT_FORMAT = AnswerFormat(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    _message_choice,
    _delta_choice,
    _choice(None, delta={"role": "assistant", "content": ""}),
)
TEXT_FORMAT = AnswerFormat(
    "cmpl-", "text_completion", "text_completion", _text_choice, _text_choice
)


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, as one body or as a stream."""
    state, hint = app_state(http), session_hint(http, body)
    max_new_tokens = body.max_completion_tokens or body.max_tokens
    turns = await run_in_threadpool(body.turns)
    request = engine_request(
        http, state, body, hint.name, max_new_tokens, stop_strings(body.stop), turns
    )
    return await _answer(http, body, request, hint.is_firm, CHAT_FORMAT)


@router.post("/v1/completions")
async def completions(http: HttpRequest, body: CompletionRequest) -> Response:
    """Continue a text, as one body or as a stream."""
    state, hint = app_state(http), session_hint(http, body)
    request = engine_request(
        http,
        state,
        body,
        hint.name,
        body.max_tokens,
        stop_strings(body.stop),
        raw_prompt=await run_in_threadpool(_prompt, state, body.prompt),
    )
    return await _answer(http, body, request, hint.is_firm, TEXT_FORMAT)


async def _answer(
    http: HttpRequest, body: AnswerRequest, request: Request, is_firm: bool, form: AnswerFormat
) -> Response:
    answer = await stream_answer(http, app_state(http), request, is_firm)
    head = {
        "id": new_id(form.prefix),
        "object": form.chunk_object if body.stream else form.object,
        "created": int(time.time()),
        "model": body.model,
    }
    if body.stream:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_chunks(head, answer, form, has_usage))
    text, report = await collect_answer(answer)
    choices = [form.choice(text, report.reason)]
    return JSONResponse(
        {**head, "choices": choices, "usage": usage(report), "kv": kv_usage(report)}
    )


async def _chunks(
    head: dict[str, Any], answer: AnswerStream, form: AnswerFormat, has_usage: bool
) -> AsyncGenerator[bytes, None]:
    if form.opening is not None:
        yield sse_event({**head, "choices": [form.opening]})
    async for frame in with_pings(answer):
        if isinstance(frame, bytes):
            yield frame
        elif isinstance(frame, str):
            yield sse_event({**head, "choices": [form.chunk(frame, None)]})
        else:
            kv = kv_usage(frame)
            yield sse_event({**head, "choices": [form.chunk(None, frame.reason)], "kv": kv})
            if has_usage:
                yield sse_event({**head, "choices": [], "usage": usage(frame), "kv": kv})
            yield DONE


def _prompt(state: AppState, prompt: str | list[str] | list[int] | tuple[list[int]]) -> str:
    """Text of the prompt; token ids are detokenized."""
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], int):
        return state.client.detokenize([each for each in prompt if isinstance(each, int)])
    if len(prompt) != 1:
        raise invalid_request(f"prompt has {len(prompt)} texts: send one per request.", "prompt")
    [only] = prompt
    if isinstance(only, list):
        return state.client.detokenize(only)
    return str(only)
