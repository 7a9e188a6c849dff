"""Responses endpoints, `/v1/responses`: stored answers that later requests continue."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from larder.core.errors import LarderError
from larder.server.answer_form import AnswerForm
from larder.server.api_errors import invalid_request, validate_session_name
from larder.server.http.app_state import AppState, app_state, tenant_of
from larder.server.http.archive import CONVERSATION, IDEMPOTENT_ANSWER, RESPONSE, ConversationItem
from larder.server.http.conversations import Limit, Order, page, stored_conversation
from larder.server.http.error_responses import as_api_error
from larder.server.http.image_parts import RequestImages
from larder.server.http.json_route import PromptRoute
from larder.server.http.protocol import (
    engine_request,
    input_usage,
    kv_usage,
    new_id,
    session_hint,
    warnings_of,
)
from larder.server.http.response_items import ResponseOutput, chat_messages, new_items
from larder.server.http.response_request import ConversationParam, ResponsesRequest
from larder.server.http.streaming import (
    PING,
    AnswerStream,
    EventStream,
    StreamIdle,
    collect_answer,
    sse_event,
    stream_answer,
)
from larder.server.http.tools import AUTO, AnswerParser, answer_deltas, answer_rules, tool_variables
from larder.server.request import ApiError, ChatMessage, Report
from larder.session.transcript.chat_template import VARIABLES_ROLE

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=PromptRoute)
# Cause of an incomplete response whose last call, which was streamed, turned out to be no JSON.
BROKEN_CALL = "invalid_function_call"
RETRY_HEADER = "x-stainless-retry-count"  # number of retries, sent by OpenAI's clients
MAX_CHAIN = 10_000
IDEMPOTENCY_HEADER = "idempotency-key"  # client's identifier of a request


@router.post("")
async def create(http: HttpRequest, request: ResponsesRequest) -> Response:
    """Create a response, as one body or as a stream, and store it."""
    state, hint, images = app_state(http), session_hint(http, request), RequestImages()
    model = state.check_model(request.model)
    key = http.headers.get(IDEMPOTENCY_HEADER)
    taken = images if model.takes_images else None
    pending = await run_in_threadpool(
        pending_response, state, tenant_of(http), request, hint.name, key, taken
    )
    repeated = await run_in_threadpool(repeated_response, pending, _is_retry(http))
    if repeated is not None:
        frames = _replay_events(repeated)
        return EventStream(frames) if request.stream else JSONResponse(repeated)
    tools, choice = request.chat_tools(model), request.chat_choice
    parallel, unsupported = request.parallel_tool_calls, state.settings.unsupported
    form, constraint = await answer_rules(request, tools, choice, parallel, model, unsupported)
    engine_input = engine_request(
        http,
        state,
        request,
        pending.session,
        request.max_output_tokens,
        turns=await run_in_threadpool(pending.turns, tools),
        constraint=constraint,
        images=images.files,
        answer_form=form,
    )
    is_firm = hint.is_firm or pending.session != hint.name
    answer = await stream_answer(http, state, engine_input, is_firm)
    if request.stream:
        return EventStream(_events(pending, form, answer))
    collected = await collect_answer(answer)
    output, is_cut = ResponseOutput(), collected.report.reason == "length"
    parser = AnswerParser(form)
    cut = (
        [*parser.push(collected.text), *parser.finish()] if is_cut else []
    )  # a call may be broken off
    output.add(cut or answer_deltas(form.parse(collected.text)))
    output.finish(is_cut=is_cut)
    cause = _incomplete_reason(collected.report, parser)
    return JSONResponse(await run_in_threadpool(pending.finish, output, collected.report, cause))


@router.get("/{name}")
def retrieve(http: HttpRequest, name: str) -> JSONResponse:
    """Retrieve a stored response."""
    return JSONResponse(stored_response(app_state(http), tenant_of(http), name)["told"])


@router.delete("/{name}")
def delete(http: HttpRequest, name: str) -> JSONResponse:
    """Delete a response. Responses that continue it can be retrieved, but not be continued."""
    stored_response(app_state(http), tenant_of(http), name)
    app_state(http).archive.remove(tenant_of(http), RESPONSE, name)
    return JSONResponse({"id": name, "object": "response.deleted", "deleted": True})


@router.get("/{name}/input_items")
def input_items(
    http: HttpRequest, name: str, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> JSONResponse:
    """List the new input items of a request."""
    document = stored_response(app_state(http), tenant_of(http), name)
    items = _stored_items(document)[: -document.get("answers", 1)]
    return JSONResponse(page(items, limit, order, after))


def _is_retry(http: HttpRequest) -> bool:
    response = http.headers.get(RETRY_HEADER, "0")
    return response.isdecimal() and response.strip("0") != ""


async def _events(
    pending: PendingResponse, form: AnswerForm, answer: AnswerStream
) -> AsyncGenerator[bytes, None]:
    numbers, parser, output = count(), AnswerParser(form), ResponseOutput()
    for event in ("response.created", "response.in_progress"):
        yield _event(numbers, event, {"response": pending.to_json("in_progress")})
    try:
        async for item in answer:
            if isinstance(item, StreamIdle):
                yield PING
            elif isinstance(item, str):
                for event, content in output.add(parser.push(item)):
                    yield _event(numbers, event, content)
            elif isinstance(item, Report):
                events, cause = output.add(parser.finish()), _incomplete_reason(item, parser)
                events += output.finish(is_cut=bool(cause))
                response = await run_in_threadpool(pending.finish, output, item, cause)
                events.append((f"response.{response['status']}", {"response": response}))
                for event, content in events:
                    yield _event(numbers, event, content)
    except LarderError as error:
        yield _failed_event(pending, error, numbers)


def _incomplete_reason(report: Report, parser: AnswerParser) -> str:
    """Cause of an incomplete answer; empty if it is not."""
    if report.reason == "length":
        return "max_output_tokens"
    return BROKEN_CALL if parser.is_broken else ""


async def _replay_events(response: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    numbers = count()
    yield _event(numbers, "response.created", {"response": response})
    yield _event(numbers, f"response.{response['status']}", {"response": response})


def _failed_event(pending: PendingResponse, error: LarderError, numbers: Iterator[int]) -> bytes:
    refusal = as_api_error(error)
    response = pending.to_json("failed")
    response["error"] = {"code": "server_error", "message": f"{refusal.code}: {refusal}"}
    return _event(numbers, "response.failed", {"response": response})


def _event(numbers: Iterator[int], event: str, content: dict[str, Any]) -> bytes:
    return sse_event({"type": event, **content, "sequence_number": next(numbers)}, event)


@dataclass(frozen=True)
class PendingResponse:
    """Response that is being generated.

    Args:
        past: items before the new ones, without instructions.
        inputs: new items.
        session: session that holds the past; None if there is none yet.
        conversation: document of the conversation, or None.
        digest: digest of the request, to detect retries.
        key: digest of the idempotency key, or None.
    """

    state: AppState
    tenant: str
    request: ResponsesRequest
    past: tuple[ConversationItem, ...]
    inputs: tuple[ConversationItem, ...]
    session: str | None
    conversation: dict[str, Any] | None
    digest: str
    key: str | None
    id: str = field(default_factory=lambda: new_id("resp_"))
    created: float = field(default_factory=time.time)

    def turns(self, tools: Sequence[Any] = ()) -> tuple[ChatMessage, ...]:
        """All messages to continue, tools and instructions first.

        Args:
            tools: in the form of chat completions.
        """
        instructions, first = self.request.instructions, list[ChatMessage]()
        if tools:
            first.append(ChatMessage(VARIABLES_ROLE, json.dumps(tool_variables(tools))))
        if instructions is not None:
            first.append(ChatMessage("system", instructions))
        return (*first, *chat_messages((*self.past, *self.inputs)))

    def to_json(self, status: str, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Response as JSON with the given status and output items."""
        request, defaults = self.request, self.state.settings.sampling
        sampling = request.sampling(defaults)
        conversation = None if self.conversation is None else {"id": self.conversation["id"]}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "conversation": conversation,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.state.check_model(request.model).answer_name,
            "output": list(output),
            "parallel_tool_calls": bool(request.tools) and request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "store": request.store,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | (request.text or {}),
            "tool_choice": request.tool_choice or AUTO,
            "tools": request.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    def finish(self, output: ResponseOutput, report: Report, cause: str) -> dict[str, Any]:
        """Final response as JSON, after storing it if requested.

        Args:
            cause: why the answer is incomplete; empty for a complete one.

        Raises:
            ApiError: 409 `conversation_changed`: another request appended to it.
        """
        response = self.to_json("incomplete" if cause else "completed", output.items)
        if cause:
            response["incomplete_details"] = {"reason": cause}
        response |= {
            "usage": input_usage(report),
            "kv": kv_usage(report),
            "completed_at": time.time(),
        }
        response |= warnings_of(self.request)
        self._store(response, output.stored(), report.session)
        return response

    def _store(
        self, response: dict[str, Any], answer: Sequence[ConversationItem], session: str
    ) -> None:
        """Write turn, response and idempotent answer in one transaction."""
        archive, tenant = self.state.archive, self.tenant
        items = (*self.inputs, *answer)
        with archive.together():
            if self.conversation is not None:
                name = self.conversation["id"]
                # Read again: its metadata may have changed meanwhile.
                newest = stored_conversation(self.state, tenant, name)
                archive.append(tenant, name, items, expected=len(self.past))
                sessions = dict.fromkeys([*newest["sessions"], session])
                last = {"sessions": list(sessions), "last": [self.digest, response]}
                last["session"] = session
                archive.put(tenant, CONVERSATION, name, newest | last)
            if self.request.store:
                document = {
                    "told": response,
                    "items": [[item.id, item.turn.role, item.turn.text] for item in items],
                    "answers": len(answer),
                    "previous": self.request.previous_response_id,
                    "session": session,
                }
                archive.put(tenant, RESPONSE, self.id, document)
            if self.key is not None:
                document_of_key = {"digest": self.digest, "told": response}
                archive.put(tenant, IDEMPOTENT_ANSWER, self.key, document_of_key)


def pending_response(
    state: AppState,
    tenant: str,
    request: ResponsesRequest,
    session: str | None,
    key: str | None = None,
    images: RequestImages | None = None,
) -> PendingResponse:
    """Pending response of a request, with the past that it continues.

    Args:
        session: session named by the request.
        key: idempotency key of the request.
        images: takes the images of the request; None for a model without a vision tower.

    Raises:
        ApiError: 400 if the request continues a conversation and a response; 404 if what it
            continues does not exist.
    """
    named = request.conversation
    name = named.id if isinstance(named, ConversationParam) else named
    if name is not None and request.previous_response_id is not None:
        raise invalid_request(
            "conversation and previous_response_id exclude each other: send one.",
            "previous_response_id",
        )
    request.check(state.settings.unsupported)
    past: tuple[ConversationItem, ...] = ()
    document: dict[str, Any] | None = None
    if name is not None:
        document = stored_conversation(state, tenant, validate_session_name(name, "conversation"))
        past = state.archive.items(tenant, name)
        session = document["session"]
    elif request.previous_response_id is not None:
        past, session = _chain(state, tenant, request.previous_response_id)
    return PendingResponse(
        state=state,
        tenant=tenant,
        request=request,
        past=past,
        inputs=new_items(request.items(), images),
        session=session,
        conversation=document,
        digest=_digest(request),
        key=_key_digest(key),
    )


def repeated_response(pending: PendingResponse, is_retry: bool) -> dict[str, Any] | None:
    """Stored answer of a repeated request; None if the request is new.

    A request is repeated if it has a known idempotency key, or, without a key, if the client marks
    it as a retry and it equals the last request of its conversation.

    Raises:
        ApiError: 422 `idempotency_key_reused`: another request used that key.
    """
    if pending.key is not None:
        document = pending.state.archive.get(pending.tenant, IDEMPOTENT_ANSWER, pending.key)
        if document is not None and document["digest"] != pending.digest:
            raise ApiError(
                f"Another request used this {IDEMPOTENCY_HEADER}: use a new key for each request, "
                "and the same key only for a retry.",
                422,
                "idempotency_key_reused",
            )
        return None if document is None else document["told"]
    last = None if pending.conversation is None else pending.conversation.get("last")
    if not is_retry or last is None or last[0] != pending.digest:
        return None
    return last[1] if isinstance(last[1], dict) else None  # earlier versions stored an id


def stored_response(state: AppState, tenant: str, name: str) -> dict[str, Any]:
    """Stored document of a response.

    Raises:
        ApiError: 404 `response_not_found`.
    """
    document = state.archive.get(tenant, RESPONSE, name)
    if document is None:
        message = "There is no such response, or it was removed."
        raise ApiError(message, 404, "response_not_found")
    return document


def _chain(state: AppState, tenant: str, name: str) -> tuple[tuple[ConversationItem, ...], str]:
    """All items up to a response, and the session that holds them."""
    links: list[dict[str, Any]] = []
    following: str | None = name
    while following is not None and len(links) < MAX_CHAIN:
        document = state.archive.get(
            tenant, RESPONSE, validate_session_name(following, "previous_response_id")
        )
        if document is None:
            raise ApiError(
                "A previous response is not stored (any more): send the whole conversation.",
                404,
                "previous_response_not_found",
                "previous_response_id",
            )
        links.append(document)
        following = document["previous"]
    items = (item for link in reversed(links) for item in _stored_items(link))
    return tuple(items), links[0]["session"]


def _stored_items(document: dict[str, Any]) -> list[ConversationItem]:
    """Items of a response: those of the input, then those of the answer."""
    return [
        ConversationItem(name, ChatMessage(role, text)) for name, role, text in document["items"]
    ]


def _digest(request: ResponsesRequest) -> str:
    text = json.dumps(request.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _key_digest(key: str | None) -> str | None:
    """Digest of an idempotency key, of fixed length."""
    return None if key is None else hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
