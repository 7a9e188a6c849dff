"""`/v1/responses`: answers that remember what they go on from."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from larder.core.errors import LarderError
from larder.server.api_errors import validate_session_name
from larder.server.http.app_state import AppState, app_state, tenant_of
from larder.server.http.archive import CONVERSATION, IDEMPOTENT_ANSWER, RESPONSE, ConversationItem
from larder.server.http.conversations import (
    Metadata,
    item_json,
    new_items,
    page,
    stored_conversation,
)
from larder.server.http.error_responses import as_api_error, invalid_field, not_found
from larder.server.http.json_route import JsonRoute
from larder.server.http.protocol import (
    GenerationRequest,
    InputMessage,
    Text,
    Tokens,
    engine_request,
    input_usage,
    kv_usage,
    request_session_hint,
)
from larder.server.http.session_hint import new_id
from larder.server.http.streaming import (
    PING,
    AnswerStream,
    EventStream,
    StreamIdle,
    collect_answer,
    sse_event,
    stream_answer,
)
from larder.server.request import ApiError, ChatMessage, Report

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


MAX_CHAIN = 10_000
IDEMPOTENCY_HEADER = "idempotency-key"  # the header by which a client knows its request


class ResponseInputMessage(InputMessage):
    """A message as responses take it."""

    type: Literal["message"] = "message"


class ConversationParam(BaseModel):
    """A conversation by its id."""

    id: Text


class ResponsesRequest(GenerationRequest):
    """What is new in a conversation, or all of one."""

    input: (
        Text
        | Annotated[
            list[ResponseInputMessage], Field(min_length=1, max_length=10_000, fail_fast=True)
        ]
    )
    instructions: Text | None = None
    conversation: Text | ConversationParam | None = None
    previous_response_id: Text | None = None
    max_output_tokens: Tokens | None = None
    metadata: Metadata | None = None
    store: bool = True

    def messages(self) -> Sequence[InputMessage]:
        """The new messages."""
        if isinstance(self.input, str):
            return (InputMessage(role="user", content=self.input),)
        return self.input


@dataclass(frozen=True)
class PendingResponse:
    """One response on its way.

    Args:
        past: turns in front of the new ones, instructions left out.
        inputs: the new ones.
        session: that holds the past; None where there is none yet.
        conversation: its document; None without one.
        digest: of what was asked: the same again is a repetition.
        key: by which the client knows its request, as the archive has it; None without one.
    """

    desk: AppState
    tenant: str
    asked: ResponsesRequest
    past: tuple[ChatMessage, ...]
    inputs: tuple[ConversationItem, ...]
    session: str | None
    conversation: dict[str, Any] | None
    digest: str
    key: str | None
    id: str = field(default_factory=lambda: new_id("resp_"))
    answer: str = field(default_factory=lambda: new_id("msg_"))
    created: float = field(default_factory=time.time)

    def turns(self) -> tuple[ChatMessage, ...]:
        """The whole text to continue."""
        said = self.asked.instructions
        first = () if said is None else (ChatMessage("system", said),)
        return (*first, *self.past, *(item.turn for item in self.inputs))

    def told(self, status: str, text: str | None = None) -> dict[str, Any]:
        """The response as it stands."""
        asked, usual = self.asked, self.desk.settings.sampling
        sampling = asked.sampling(usual)
        conversation = None if self.conversation is None else {"id": self.conversation["id"]}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "conversation": conversation,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": [] if text is None else [self.message(text)],
            "parallel_tool_calls": False,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "store": asked.store,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }

    def message(self, text: str) -> dict[str, Any]:
        """The answer as an item."""
        return item_json(ConversationItem(self.answer, ChatMessage("assistant", text)))

    def finish(self, text: str, report: Report) -> dict[str, Any]:
        """The response when all is said; kept, if it is to be.

        Raises:
            Refusal: 409: the conversation has grown meanwhile.
        """
        is_whole = report.reason != "length"
        told = self.told("completed" if is_whole else "incomplete", text)
        if not is_whole:
            told["incomplete_details"] = {"reason": "max_output_tokens"}
        told |= {"usage": input_usage(report), "kv": kv_usage(report), "completed_at": time.time()}
        answer = ConversationItem(self.answer, ChatMessage("assistant", text))
        self._keep(told, answer, report.session)
        return told

    def _keep(self, told: dict[str, Any], answer: ConversationItem, session: str) -> None:
        """Write the turn, the response and by what a retry is known: all of it, or nothing."""
        archive, tenant = self.desk.archive, self.tenant
        items = (*self.inputs, answer)
        with archive.together():
            if self.conversation is not None:
                name = self.conversation["id"]
                newest = stored_conversation(
                    self.desk, tenant, name
                )  # what was noted of it meanwhile stays
                archive.append(tenant, name, items, expected=len(self.past))
                sessions = dict.fromkeys([*newest["sessions"], session])
                last = {"sessions": list(sessions), "last": [self.digest, told]}
                last["session"] = session
                archive.put(tenant, CONVERSATION, name, newest | last)
            if self.asked.store:
                document = {
                    "told": told,
                    "items": [[item.id, item.turn.role, item.turn.text] for item in items],
                    "previous": self.asked.previous_response_id,
                    "session": session,
                }
                archive.put(tenant, RESPONSE, self.id, document)
            if self.key is not None:
                own = {"digest": self.digest, "told": told}
                archive.put(tenant, IDEMPOTENT_ANSWER, self.key, own)


def pending_response(
    desk: AppState,
    tenant: str,
    asked: ResponsesRequest,
    session: str | None,
    key: str | None = None,
) -> PendingResponse:
    """Find what a request goes on from.

    Args:
        session: that the request names besides.
        key: the request's idempotency key.

    Raises:
        Refusal: 400, if it goes on from two things; 404, if from none that is there.
    """
    named = asked.conversation
    name = named.id if isinstance(named, ConversationParam) else named
    if name is not None and asked.previous_response_id is not None:
        raise invalid_field(
            "conversation and previous_response_id exclude each other: send one.",
            "previous_response_id",
        )
    asked.check()
    inputs, own = new_items(asked.messages()), (_digest(asked), _hidden(key))
    if name is not None:
        document = stored_conversation(desk, tenant, validate_session_name(name, "conversation"))
        past = tuple(item.turn for item in desk.archive.items(tenant, name))
        return PendingResponse(
            desk, tenant, asked, past, inputs, document["session"], document, *own
        )
    if asked.previous_response_id is not None:
        past, before = _chain(desk, tenant, asked.previous_response_id)
        return PendingResponse(desk, tenant, asked, past, inputs, before, None, *own)
    return PendingResponse(desk, tenant, asked, (), inputs, session, None, *own)


def repeated_response(what: PendingResponse, is_retry: bool) -> dict[str, Any] | None:
    """What was answered to this very request before; None if it is new.

    It is the same request if it has the same idempotency key; without one, if its client says that
    it asks once more and its conversation was asked just this last.

    Raises:
        Refusal: 422 `idempotency_key_reused`, if another request had that key.
    """
    if what.key is not None:
        document = what.desk.archive.get(what.tenant, IDEMPOTENT_ANSWER, what.key)
        if document is not None and document["digest"] != what.digest:
            raise ApiError(
                f"Another request had this {IDEMPOTENCY_HEADER}: take a new key for each "
                "request, and the same "
                "one for a retry alone.",
                422,
                "idempotency_key_reused",
            )
        return None if document is None else document["told"]
    last = None if what.conversation is None else what.conversation.get("last")
    if not is_retry or last is None or last[0] != what.digest:
        return None
    return last[1] if isinstance(last[1], dict) else None  # earlier larders have noted an id


def stored_response(desk: AppState, tenant: str, name: str) -> dict[str, Any]:
    """A response that was kept, with what belongs to it.

    Raises:
        Refusal: 404 `response_not_found`.
    """
    document = desk.archive.get(tenant, RESPONSE, name)
    if document is None:
        raise not_found("There is no such response, or not any more.", "response_not_found")
    return document


def _chain(desk: AppState, tenant: str, name: str) -> tuple[tuple[ChatMessage, ...], str]:
    """Everything said up to a response, and the session that holds it."""
    links: list[dict[str, Any]] = []
    following: str | None = name
    while following is not None and len(links) < MAX_CHAIN:
        document = desk.archive.get(
            tenant, RESPONSE, validate_session_name(following, "previous_response_id")
        )
        if document is None:
            raise ApiError(
                "A previous response is not kept (any more): send the conversation itself.",
                404,
                "previous_response_not_found",
                "previous_response_id",
            )
        links.append(document)
        following = document["previous"]
    turns = (ChatMessage(role, text) for link in reversed(links) for _, role, text in link["items"])
    return tuple(turns), links[0]["session"]


def _digest(asked: ResponsesRequest) -> str:
    text = json.dumps(asked.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _hidden(key: str | None) -> str | None:
    """An idempotency key as the archive has it: of one length, whatever it says."""
    return None if key is None else hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
