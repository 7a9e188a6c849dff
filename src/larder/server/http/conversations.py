"""Conversations endpoints, `/v1/conversations`: transcripts stored by the server.

The session of a conversation has the same name. Deleting an item changes the text: the next answer
recomputes what it must, in a new session.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic import Field

from larder.core.errors import Damaged
from larder.server.http.app_state import AppState, app_state, tenant_of
from larder.server.http.archive import CONVERSATION, ConversationItem
from larder.server.http.json_body import JsonBody
from larder.server.http.json_route import JsonRoute
from larder.server.http.protocol import Text, new_id
from larder.server.http.response_items import ResponseInputItem, item_json, new_items
from larder.server.request import ApiError

router = APIRouter(prefix="/v1/conversations", tags=["conversations"], route_class=JsonRoute)
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=16),
]
Limit = Annotated[int, Field(ge=1, le=100)]
Order = Literal["asc", "desc"]
PUBLIC_FIELDS = ("id", "object", "created_at", "metadata")


class ConversationCreateRequest(JsonBody):
    """Body of a request that creates a conversation."""

    items: Annotated[list[ResponseInputItem], Field(max_length=10_000, fail_fast=True)] | None = (
        None
    )
    metadata: Metadata | None = None


class ConversationUpdateRequest(JsonBody):
    """New metadata of a conversation."""

    metadata: Metadata | None = None


class ItemsCreateRequest(JsonBody):
    """Messages to add to a conversation."""

    items: Annotated[
        list[ResponseInputItem], Field(min_length=1, max_length=10_000, fail_fast=True)
    ]


@router.post("")
def create(http: HttpRequest, body: ConversationCreateRequest | None = None) -> JSONResponse:
    """Create a conversation, with or without messages."""
    state, tenant, name = app_state(http), tenant_of(http), new_id("conv_")
    item_id = body or ConversationCreateRequest()
    document = {
        "id": name,
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": item_id.metadata or {},
        "session": name,
        "sessions": [name],
    }
    with state.archive.together():
        state.archive.put(tenant, CONVERSATION, name, document)
        state.archive.append(tenant, name, new_items(item_id.items or ()))
    return JSONResponse(_conversation_json(document))


@router.get("/{name}")
def retrieve(http: HttpRequest, name: str) -> JSONResponse:
    """Retrieve a conversation."""
    return JSONResponse(
        _conversation_json(stored_conversation(app_state(http), tenant_of(http), name))
    )


@router.post("/{name}")
def update(http: HttpRequest, name: str, body: ConversationUpdateRequest) -> JSONResponse:
    """Replace the metadata of a conversation."""
    state, tenant = app_state(http), tenant_of(http)
    with state.archive.together():
        document = {**stored_conversation(state, tenant, name), "metadata": body.metadata or {}}
        state.archive.put(tenant, CONVERSATION, name, document)
    return JSONResponse(_conversation_json(document))


@router.delete("/{name}")
def delete(http: HttpRequest, name: str) -> JSONResponse:
    """Delete a conversation and every session that has held it."""
    state, tenant = app_state(http), tenant_of(http)
    try:
        sessions = stored_conversation(state, tenant, name)["sessions"]
    except Damaged:  # its list of sessions is not trusted
        sessions = [name]
    for session in sessions:
        try:
            state.client.remove(tenant, session)
        except ApiError as refusal:
            if refusal.code != "session_not_found":  # never used, or already removed
                raise
    state.archive.remove(tenant, CONVERSATION, name)
    return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})


@router.get("/{name}/items")
def list_items(
    http: HttpRequest, name: str, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> JSONResponse:
    """List the messages of a conversation."""
    stored_conversation(app_state(http), tenant_of(http), name)
    items = app_state(http).archive.items(tenant_of(http), name)
    return JSONResponse(page(items, limit, order, after))


@router.post("/{name}/items")
def add_items(http: HttpRequest, name: str, body: ItemsCreateRequest) -> JSONResponse:
    """Add messages to a conversation."""
    state, tenant = app_state(http), tenant_of(http)
    items = new_items(body.items)
    with state.archive.together():
        stored_conversation(state, tenant, name)
        state.archive.append(tenant, name, items)
    return JSONResponse(page(items, len(items), "asc", None))


@router.get("/{name}/items/{item}")
def retrieve_item(http: HttpRequest, name: str, item: str) -> JSONResponse:
    """Retrieve one message of a conversation."""
    return JSONResponse(item_json(_item(app_state(http), tenant_of(http), name, item)))


@router.delete("/{name}/items/{item}")
def delete_item(http: HttpRequest, name: str, item: str) -> JSONResponse:
    """Delete a message of a conversation."""
    state, tenant = app_state(http), tenant_of(http)
    state.archive.remove_item(tenant, name, _item(state, tenant, name, item).id)
    return JSONResponse(_conversation_json(stored_conversation(state, tenant, name)))


def stored_conversation(state: AppState, tenant: str, name: str) -> dict[str, Any]:
    """Stored document of a tenant's conversation.

    Raises:
        ApiError: 404 `conversation_not_found`.
    """
    document = state.archive.get(tenant, CONVERSATION, name)
    if document is None:
        message = "There is no such conversation: create one with POST /v1/conversations."
        raise ApiError(message, 404, "conversation_not_found", "conversation")
    return document


def page(
    items: Sequence[ConversationItem], limit: int, order: Order, after: str | None
) -> dict[str, Any]:
    """Page of a list of messages as JSON.

    Args:
        items: the oldest first.

    Raises:
        ApiError: 404 if no message has the id `after`.
    """
    items = items if order == "asc" else items[::-1]
    start, names = 0, [item.id for item in items]
    if after is not None:
        if after not in names:
            raise ApiError("There is no such item here.", 404, "item_not_found", "after")
        start = names.index(after) + 1
    chosen = items[start : start + limit]
    return {
        "object": "list",
        "data": [item_json(item) for item in chosen],
        "first_id": chosen[0].id if chosen else "",
        "last_id": chosen[-1].id if chosen else "",
        "has_more": start + limit < len(items),
    }


def _item(state: AppState, tenant: str, name: str, item_id: str) -> ConversationItem:
    stored_conversation(state, tenant, name)
    for item in state.archive.items(tenant, name):
        if item.id == item_id:
            return item
    raise ApiError("There is no such item in this conversation.", 404, "item_not_found")


def _conversation_json(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key in PUBLIC_FIELDS}
