"""Completion endpoints: `POST /v1/chat/completions` continues a conversation, `POST
/v1/completions` continues raw text without a chat template."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from larder.server.api_errors import invalid_request
from larder.server.http.app_state import AppState, app_state
from larder.server.http.json_route import JsonRoute
from larder.server.http.logprobs import chat_logprobs, text_logprobs
from larder.server.http.protocol import (
    NEUTRAL_VALUES,
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
    warnings_of,
)
from larder.server.http.streaming import (
    DONE,
    AnswerStream,
    CompleteAnswer,
    EventStream,
    Logprobs,
    collect_answer,
    sse_event,
    stream_answer,
    with_pings,
)
from larder.server.request import ChatMessage, Report, Request
from larder.session.transcript.chat_template import VARIABLES_ROLE

router = APIRouter(tags=["text"], route_class=JsonRoute)
Texts = Annotated[list[Text], Field(max_length=128, fail_fast=True)]
Ids = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


TemplateValue = Text | bool | int | float | None
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


class AnswerRequest(GenerationRequest):
    """Fields of both endpoints."""

    extra_fields: ClassVar[frozenset[str]] = frozenset(NEUTRAL_VALUES) - {
        "logprobs",
        "top_logprobs",
    }
    max_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None


class ChatCompletionRequest(AnswerRequest):
    """A conversation to continue."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: Annotated[dict[Text, TemplateValue], Field(max_length=32)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of the most likely tokens beside each token.

        Raises:
            ApiError: 400: `top_logprobs` without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise invalid_request("top_logprobs needs logprobs: true; add it.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def turns(self, variables: frozenset[str]) -> tuple[ChatMessage, ...]:
        """Messages in the form of the engine, variables of the chat template before them.

        Args:
            variables: those that the template has; a warning names others.
        """
        given = self.chat_template_kwargs or {}
        for name in given.keys() - variables:
            known = ", ".join(sorted(variables)) or "none"
            self.warn(
                f"chat_template_kwargs.{name[:100]} is no variable of the model's chat template "
                f"(it has: {known}) and was ignored."
            )
        messages = tuple(message.turn() for message in self.messages)
        used = {name: given[name] for name in sorted(given.keys() & variables)}
        first = (ChatMessage(VARIABLES_ROLE, json.dumps(used)),) if used else ()
        return (*first, *messages)


class CompletionRequest(AnswerRequest):
    """Text to continue: a string, a list of one string, or token ids."""

    prompt: Text | Texts | Ids | tuple[Ids]
    logprobs: TopLogprobs | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of the most likely tokens beside each token."""
        return self.logprobs


@dataclass(frozen=True)
class AnswerFormat:
    """JSON of an answer at one endpoint.

    Args:
        prefix: of the answer's id.
        object: type of a whole answer.
        chunk_object: type of a streamed part.
        choice: what a choice of a whole answer has of its text.
        chunk: what a choice of a streamed part has of its text; of None at the end.
        logprobs: log-probabilities of tokens, the first of which begins at a character.
        opening: what the choice before the text has, if there is one.
    """

    prefix: str
    object: str
    chunk_object: str
    choice: Callable[[str], dict[str, Any]]
    chunk: Callable[[str | None], dict[str, Any]]
    logprobs: Callable[[Logprobs, int], dict[str, Any]]
    opening: dict[str, Any] | None = None


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _delta(text: str | None) -> dict[str, Any]:
    return {"delta": {} if text is None else {"content": text}}


def _text(text: str | None) -> dict[str, Any]:
    return {"text": text or ""}


def _choice(
    content: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}


CHAT_FORMAT = AnswerFormat(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    _message,
    _delta,
    chat_logprobs,
    {"delta": {"role": "assistant", "content": ""}},
)
TEXT_FORMAT = AnswerFormat(
    "cmpl-", "text_completion", "text_completion", _text, _text, text_logprobs
)


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, as one body or as a stream."""
    state, hint = app_state(http), session_hint(http, body)
    max_new_tokens = body.max_completion_tokens or body.max_tokens
    variables = state.check_model(body.model).template_variables
    turns = await run_in_threadpool(body.turns, variables)
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
        return EventStream(_chunks(head, answer, form, has_usage, warnings_of(body)))
    said = await collect_answer(answer)
    told = {"usage": usage(said.report), "kv": kv_usage(said.report), **warnings_of(body)}
    choices = [_whole_choice(said, form, body.num_logprobs)]
    return JSONResponse({**head, "choices": choices, **told})


def _whole_choice(
    said: CompleteAnswer, form: AnswerFormat, num_logprobs: int | None
) -> dict[str, Any]:
    logprobs = None if num_logprobs is None else form.logprobs(said.logprobs, 0)
    return _choice(form.choice(said.text), said.report.reason, logprobs)


async def _chunks(
    head: dict[str, Any],
    answer: AnswerStream,
    form: AnswerFormat,
    has_usage: bool,
    warnings: dict[str, list[str]],
) -> AsyncGenerator[bytes, None]:
    if form.opening is not None:
        yield sse_event({**head, "choices": [_choice(form.opening)]})
    waiting, length = Logprobs(), 0
    async for frame in with_pings(answer):
        if isinstance(frame, bytes):
            yield frame
        elif isinstance(frame, tuple):
            waiting += frame
        elif isinstance(frame, str):
            logprobs = form.logprobs(waiting, length) if waiting else None
            yield sse_event({**head, "choices": [_choice(form.chunk(frame), None, logprobs)]})
            waiting, length = (), length + len(frame)
        else:
            if waiting:
                last = _choice(form.chunk(""), None, form.logprobs(waiting, length))
                yield sse_event({**head, "choices": [last]})
            for event in _last_chunks(frame, form, has_usage):
                yield sse_event({**head, **event, **warnings})
            yield DONE


def _last_chunks(report: Report, form: AnswerFormat, has_usage: bool) -> Iterator[dict[str, Any]]:
    kv = kv_usage(report)
    yield {"choices": [_choice(form.chunk(None), report.reason)], "kv": kv}
    if has_usage:
        yield {"choices": [], "usage": usage(report), "kv": kv}


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
