"""Anthropic's form of a conversation: `POST /v1/messages`, and the count of its tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, BeforeValidator, Field

from larder.core.errors import LarderError
from larder.engine.constraint import Constraint
from larder.server.api_errors import invalid_request
from larder.server.http.app_state import app_state
from larder.server.http.error_responses import MESSAGES_PATH, as_api_error, messages_error_body
from larder.server.http.image_parts import RequestImages
from larder.server.http.json_route import JsonRoute
from larder.server.http.protocol import (
    GenerationRequest,
    Stop,
    Text,
    Tokens,
    engine_request,
    kv_usage,
    new_id,
    session_hint,
    warnings_of,
)
from larder.server.http.streaming import (
    AnswerStream,
    EventStream,
    StreamIdle,
    collect_answer,
    sse_event,
    stream_answer,
)
from larder.server.http.structured import answer_constraint
from larder.server.operations import count_prompt
from larder.server.request import ChatMessage, Report

router = APIRouter(tags=["text"], route_class=JsonRoute, prefix=MESSAGES_PATH)


class ImageSource(BaseModel):
    """Data of an image."""

    type: Text
    media_type: Text | None = None
    data: Text | None = None

    @property
    def url(self) -> str:
        """The same image as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class ContentBlock(BaseModel):
    """Block of a message: a text, or an image in base64."""

    type: Literal["text", "image"]
    text: Text | None = None
    source: ImageSource | None = None


class SystemBlock(BaseModel):
    """Block of the system prompt."""

    type: Literal["text"]
    text: Text


def _known_blocks(content: Any) -> Any:
    """Raises: ValueError: a block is neither a text nor an image in base64."""
    for block in content if isinstance(content, list) else ():
        if block.type not in ("text", "image"):
            raise ValueError(
                f"a block is of type {block.type!r}, but messages hold blocks of the types text "
                "and image"
            )
        if block.type == "text" and block.text is None:
            raise ValueError("a block has no text: send one")
        if block.type == "image" and (block.source is None or block.source.type != "base64"):
            raise ValueError("an image has no source of type base64, and nothing is fetched here")
    return content


class Message(BaseModel):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[
        Text | Annotated[list[ContentBlock], Field(fail_fast=True)], BeforeValidator(_known_blocks)
    ]

    def turn(self, images: RequestImages | None) -> ChatMessage:
        """Message in the form of the engine.

        Raises:
            ApiError: 400: an image that is not taken here, or cannot be read.
        """
        if isinstance(self.content, str):
            return ChatMessage(self.role, self.content)
        return ChatMessage(self.role, "".join(self._text(each, images) for each in self.content))

    def _text(self, block: ContentBlock, images: RequestImages | None) -> str:
        if block.source is None:
            return block.text or ""
        if images is None or self.role != "user":
            raise invalid_request(
                "An image stands where only texts are read: send it in a message of the user, to a "
                "server whose model sees.",
                "messages",
            )
        return images.mark(block.source.url)


class CountRequest(GenerationRequest):
    """A conversation whose tokens are counted."""

    json_fields: ClassVar[frozenset[str]] = frozenset({"output_config", "metadata"})
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    system: Text | Annotated[list[SystemBlock], Field(max_length=1000, fail_fast=True)] | None = (
        None
    )
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    def turns(self, images: RequestImages | None) -> tuple[ChatMessage, ...]:
        """Messages in the form of the engine, the system prompt before them.

        Args:
            images: takes the images; None for a model without a vision tower.
        """
        said = self.system or ""
        if not isinstance(said, str):
            said = "\n".join(block.text for block in said)
        first = (ChatMessage("system", said),) if said else ()
        return (*first, *(message.turn(images) for message in self.messages))


class MessagesRequest(CountRequest):
    """A conversation to continue."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None

    def constraint(self) -> Constraint | None:
        """What the answer must match, by `output_config.format`.

        Raises:
            ApiError: 400 for a format that is malformed or cannot be enforced.
        """
        wanted = (self.output_config or {}).get("format")
        if wanted is None:
            return None
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise invalid_request(
                "output_config.format must be of type json_schema, with a schema.", "output_config"
            )
        schema = {"name": "answer", "schema": wanted.get("schema"), "strict": True}
        return answer_constraint({"type": "json_schema", "json_schema": schema}, None)


@router.post("")
async def messages(http: HttpRequest, body: MessagesRequest) -> Response:
    """Answer a conversation, as one body or as a stream."""
    state, hint, images = app_state(http), session_hint(http, body), RequestImages()
    taken = images if state.check_model(body.model).takes_images else None
    turns = await run_in_threadpool(body.turns, taken)
    constraint = await run_in_threadpool(body.constraint)
    request = engine_request(
        http,
        state,
        body,
        hint.name,
        body.max_tokens,
        tuple(body.stop_sequences or ()),
        turns,
        constraint=constraint,
        images=images.files,
    )
    answer = await stream_answer(http, state, request, hint.is_firm)
    head = {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": state.check_model(None).name,
    }
    if body.stream:
        return EventStream(_events(head, answer, warnings_of(body)))
    said = await collect_answer(answer)
    return JSONResponse(
        {
            **head,
            "content": [{"type": "text", "text": said.text}],
            **_ending(said.report),
            "usage": _usage(said.report),
            "kv": kv_usage(said.report),
            **warnings_of(body),
        }
    )


@router.post("/count_tokens")
async def count_tokens(http: HttpRequest, body: CountRequest) -> JSONResponse:
    """Count the tokens of a conversation, up to the beginning of its answer."""
    state, images = app_state(http), RequestImages()
    body.check()
    taken = images if state.check_model(body.model).takes_images else None
    turns = await run_in_threadpool(body.turns, taken)
    count = await run_in_threadpool(state.client.call, count_prompt, turns, images.files)
    return JSONResponse({"input_tokens": count, **warnings_of(body)})


async def _events(
    head: dict[str, Any], answer: AnswerStream, warnings: dict[str, list[str]]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a streamed answer; an error is the last one."""
    # The numbers of tokens follow at the end.
    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": NO_USAGE}
    yield _event("message_start", message={**head, **empty})
    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    try:
        async for item in answer:
            if isinstance(item, StreamIdle):
                yield _event("ping")
            elif isinstance(item, str):
                delta = {"type": "text_delta", "text": item}
                yield _event("content_block_delta", index=0, delta=delta)
            elif isinstance(item, Report):
                yield _event("content_block_stop", index=0)
                told = {"usage": _usage(item), "kv": kv_usage(item), **warnings}
                yield _event("message_delta", delta=_ending(item), **told)
                yield _event("message_stop")
    except LarderError as error:
        yield sse_event(messages_error_body(as_api_error(error)), "error")


def _event(name: str, **content: Any) -> bytes:
    return sse_event({"type": name, **content}, name)


NO_USAGE = {"input_tokens": 0, "output_tokens": 0}


def _usage(report: Report) -> dict[str, int]:
    """Token usage: input tokens are those that were neither cached nor are cached from now on."""
    return {
        "input_tokens": 0,
        "cache_read_input_tokens": report.cached_tokens,
        "cache_creation_input_tokens": report.prompt_tokens - report.cached_tokens,
        "output_tokens": report.new_tokens,
    }


def _ending(report: Report) -> dict[str, str | None]:
    """Why the answer ended."""
    if report.matched_stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": report.matched_stop}
    reason = "max_tokens" if report.reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
