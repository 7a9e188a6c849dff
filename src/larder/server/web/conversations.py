"""`/v1/conversations`: conversations that the server remembers, message by message.

The session of a conversation is named after it. If an item is deleted, the text is another one:
the next answer reads it again as far as it must, and its session is a new one.
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
from larder.server.request import Refusal
from larder.server.web.archive import CONVERSATION, Item
from larder.server.web.asking import Message, Text
from larder.server.web.desk import Desk, desk_of, tenant_of
from larder.server.web.json_route import JsonRoute
from larder.server.web.naming import new_id
from larder.server.web.refusing import missing
from larder.server.web.shapes import Body

router = APIRouter(prefix="/v1/conversations", tags=["conversations"], route_class=JsonRoute)
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=16),
]
SHOWN = ("id", "object", "created_at", "metadata")
CONTENT = {"assistant": "output_text"}


class Begun(Body):
    """A conversation to make."""

    items: Annotated[list[Message], Field(max_length=10_000, fail_fast=True)] | None = None
    metadata: Metadata | None = None


class Told(Body):
    """What to note about a conversation."""

    metadata: Metadata | None = None


class Added(Body):
    """Messages to add to a conversation."""

    items: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]


@router.post("")
def create(http: HttpRequest, begun: Begun | None = None) -> JSONResponse:
    """Make a conversation, with or without messages."""
    desk, tenant, name = desk_of(http), tenant_of(http), new_id("conv_")
    wanted = begun or Begun()
    document = {
        "id": name,
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": wanted.metadata or {},
        "session": name,
        "sessions": [name],
    }
    with desk.archive.together():
        desk.archive.put(tenant, CONVERSATION, name, document)
        desk.archive.append(tenant, name, items_of(wanted.items or ()))
    return JSONResponse(_shown(document))


@router.get("/{name}")
def retrieve(http: HttpRequest, name: str) -> JSONResponse:
    """Tell of a conversation."""
    return JSONResponse(_shown(found(desk_of(http), tenant_of(http), name)))


@router.post("/{name}")
def update(http: HttpRequest, name: str, told: Told) -> JSONResponse:
    """Note something else about a conversation."""
    desk, tenant = desk_of(http), tenant_of(http)
    with desk.archive.together():
        document = {**found(desk, tenant, name), "metadata": told.metadata or {}}
        desk.archive.put(tenant, CONVERSATION, name, document)
    return JSONResponse(_shown(document))


@router.delete("/{name}")
def delete(http: HttpRequest, name: str) -> JSONResponse:
    """Forget a conversation, and every session that has held it."""
    desk, tenant = desk_of(http), tenant_of(http)
    try:
        sessions = found(desk, tenant, name)["sessions"]
    except Damaged:  # what it tells is not believed, and it goes
        sessions = [name]
    for session in sessions:
        try:
            desk.hub.remove(tenant, session)
        except Refusal as refusal:
            if refusal.code != "session_not_found":  # nothing was asked in it, or it is gone
                raise
    desk.archive.remove(tenant, CONVERSATION, name)
    return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})


@router.get("/{name}/items")
def list_items(
    http: HttpRequest,
    name: str,
    limit: Annotated[int, Field(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> JSONResponse:
    """List the messages of a conversation."""
    found(desk_of(http), tenant_of(http), name)
    items = list(desk_of(http).archive.items(tenant_of(http), name))
    if order == "desc":
        items.reverse()
    return JSONResponse(page(items, limit, after))


@router.post("/{name}/items")
def add_items(http: HttpRequest, name: str, added: Added) -> JSONResponse:
    """Add messages to a conversation."""
    desk, tenant = desk_of(http), tenant_of(http)
    items = items_of(added.items)
    with desk.archive.together():
        found(desk, tenant, name)
        desk.archive.append(tenant, name, items)
    return JSONResponse(page(items, len(items), None))


@router.get("/{name}/items/{item}")
def retrieve_item(http: HttpRequest, name: str, item: str) -> JSONResponse:
    """Tell one message of a conversation."""
    return JSONResponse(shown_item(_item(desk_of(http), tenant_of(http), name, item)))


@router.delete("/{name}/items/{item}")
def delete_item(http: HttpRequest, name: str, item: str) -> JSONResponse:
    """Take a message out of a conversation."""
    desk, tenant = desk_of(http), tenant_of(http)
    desk.archive.remove_item(tenant, name, _item(desk, tenant, name, item).id)
    return JSONResponse(_shown(found(desk, tenant, name)))


def found(desk: Desk, tenant: str, name: str) -> dict[str, Any]:
    """A conversation of a tenant.

    Raises:
        Refusal: 404 `conversation_not_found`.
    """
    document = desk.archive.get(tenant, CONVERSATION, name)
    if document is None:
        raise missing(
            "There is no such conversation: make one with POST /v1/conversations.",
            "conversation_not_found",
            "conversation",
        )
    return document


def items_of(messages: Sequence[Message]) -> tuple[Item, ...]:
    """Messages with ids of their own."""
    return tuple(Item(new_id("msg_"), message.turn()) for message in messages)


def shown_item(item: Item) -> dict[str, Any]:
    """A message as conversations and responses tell it."""
    kind = CONTENT.get(item.turn.role, "input_text")
    content: dict[str, Any] = {"type": kind, "text": item.turn.text}
    if kind == "output_text":
        content |= {"annotations": [], "logprobs": []}
    return {
        "id": item.id,
        "type": "message",
        "role": item.turn.role,
        "status": "completed",
        "content": [content],
    }


def page(items: Sequence[Item], limit: int, after: str | None) -> dict[str, Any]:
    """Some of a list of messages.

    Raises:
        Refusal: 404, if `after` is none of them.
    """
    start, names = 0, [item.id for item in items]
    if after is not None:
        if after not in names:
            raise missing("There is no such item here.", "item_not_found", "after")
        start = names.index(after) + 1
    chosen = items[start : start + limit]
    return {
        "object": "list",
        "data": [shown_item(item) for item in chosen],
        "first_id": chosen[0].id if chosen else "",
        "last_id": chosen[-1].id if chosen else "",
        "has_more": start + limit < len(items),
    }


def _item(desk: Desk, tenant: str, name: str, wanted: str) -> Item:
    found(desk, tenant, name)
    for item in desk.archive.items(tenant, name):
        if item.id == wanted:
            return item
    raise missing("There is no such item in this conversation.", "item_not_found")


def _shown(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key in SHOWN}
