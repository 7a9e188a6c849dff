"""`/v1/responses`: answers that remember what they go on from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from larder.core.errors import LarderError
from larder.server.http.app_state import app_state, tenant_of
from larder.server.http.archive import RESPONSE, ConversationItem
from larder.server.http.conversations import page
from larder.server.http.error_responses import as_api_error
from larder.server.http.json_route import JsonRoute
from larder.server.http.protocol import engine_request, request_session_hint
from larder.server.http.response_objects import (
    IDEMPOTENCY_HEADER,
    PendingResponse,
    ResponsesRequest,
    pending_response,
    repeated_response,
    stored_response,
)
from larder.server.http.streaming import (
    PING,
    AnswerStream,
    EventStream,
    StreamIdle,
    collect_answer,
    sse_event,
    stream_answer,
)
from larder.server.request import ChatMessage, Report

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=JsonRoute)
RETRY_HEADER = "x-stainless-retry-count"  # what OpenAI's clients say of how often they have tried


@router.post("")
async def create(http: HttpRequest, asked: ResponsesRequest) -> Response:
    """Answer, in one piece or as it comes, and remember it."""
    desk, hint = app_state(http), request_session_hint(http, app_state(http), asked)
    key = http.headers.get(IDEMPOTENCY_HEADER)
    what = await run_in_threadpool(pending_response, desk, tenant_of(http), asked, hint.name, key)
    again = await run_in_threadpool(repeated_response, what, _is_retry(http))
    if again is not None:
        frames = _replay_events(again)
        return EventStream(frames) if asked.stream else JSONResponse(again)
    longest, is_firm = asked.max_output_tokens, hint.is_firm or what.session != hint.name
    wanted = engine_request(http, desk, asked, what.session, longest, turns=what.turns())
    heard = await stream_answer(http, desk, wanted, is_firm)
    if asked.stream:
        return EventStream(_events(what, heard))
    text, report = await collect_answer(heard)
    return JSONResponse(await run_in_threadpool(what.finish, text, report))


@router.get("/{name}")
def retrieve(http: HttpRequest, name: str) -> JSONResponse:
    """Tell a response once more."""
    return JSONResponse(stored_response(app_state(http), tenant_of(http), name)["told"])


@router.delete("/{name}")
def delete(http: HttpRequest, name: str) -> JSONResponse:
    """Forget a response. Those that go on from it can be told, but not be gone on from."""
    stored_response(app_state(http), tenant_of(http), name)
    app_state(http).archive.remove(tenant_of(http), RESPONSE, name)
    return JSONResponse({"id": name, "object": "response.deleted", "deleted": True})


@router.get("/{name}/input_items")
def input_items(
    http: HttpRequest,
    name: str,
    limit: Annotated[int, Field(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> JSONResponse:
    """List what was new in a request."""
    document = stored_response(app_state(http), tenant_of(http), name)
    items = [
        ConversationItem(own, ChatMessage(role, text)) for own, role, text in document["items"][:-1]
    ]
    if order == "desc":
        items.reverse()
    return JSONResponse(page(items, limit, after))


def _is_retry(http: HttpRequest) -> bool:
    told = http.headers.get(RETRY_HEADER, "0")
    return told.isdecimal() and told.strip("0") != ""


async def _events(what: PendingResponse, heard: AnswerStream) -> AsyncGenerator[bytes, None]:
    numbers, pieces = count(), list[str]()
    for event in ("response.created", "response.in_progress"):
        yield _event(numbers, event, {"response": what.told("in_progress")})
    for event, content in _opening_events(what):
        yield _event(numbers, event, content)
    place = {"item_id": what.answer, "output_index": 0, "content_index": 0, "logprobs": []}
    try:
        async for item in heard:
            if isinstance(item, StreamIdle):
                yield PING
            elif isinstance(item, str):
                pieces.append(item)
                yield _event(numbers, "response.output_text.delta", place | {"delta": item})
            else:
                for frame in await _closing_events(what, "".join(pieces), item, numbers):
                    yield frame
    except LarderError as error:
        yield _failed_event(what, error, numbers)


def _opening_events(what: PendingResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    item = what.message("") | {"status": "in_progress", "content": []}
    yield "response.output_item.added", {"output_index": 0, "item": item}
    [part] = what.message("")["content"]
    place = {"item_id": what.answer, "output_index": 0, "content_index": 0}
    yield "response.content_part.added", place | {"part": part}


async def _closing_events(
    what: PendingResponse, text: str, report: Report, numbers: Iterator[int]
) -> list[bytes]:
    """The last events; the turn is kept before they are told."""
    told = await run_in_threadpool(what.finish, text, report)
    [item] = told["output"]
    place = {"item_id": what.answer, "output_index": 0, "content_index": 0}
    said = {"text": text, "logprobs": []}
    return [
        _event(numbers, "response.output_text.done", place | said),
        _event(numbers, "response.content_part.done", place | {"part": item["content"][0]}),
        _event(numbers, "response.output_item.done", {"output_index": 0, "item": item}),
        _event(numbers, f"response.{told['status']}", {"response": told}),
    ]


async def _replay_events(told: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    numbers = count()
    yield _event(numbers, "response.created", {"response": told})
    yield _event(numbers, f"response.{told['status']}", {"response": told})


def _failed_event(what: PendingResponse, error: LarderError, numbers: Iterator[int]) -> bytes:
    refusal = as_api_error(error)
    told = what.told("failed")
    told["error"] = {"code": "server_error", "message": f"{refusal.code}: {refusal}"}
    return _event(numbers, "response.failed", {"response": told})


def _event(numbers: Iterator[int], event: str, content: dict[str, Any]) -> bytes:
    return sse_event({"type": event, **content, "sequence_number": next(numbers)}, event)
