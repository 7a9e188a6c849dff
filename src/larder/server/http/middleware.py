"""What stands before every endpoint: who asks, and how much may be sent."""

from __future__ import annotations

from fastapi.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from larder.server.http import error_responses
from larder.server.http.app_state import HttpSettings
from larder.server.http.auth import Authenticator
from larder.server.http.body_budget import BodyBudget
from larder.server.request import ApiError
from larder.store.ledger import NO_TENANT, Reservation

SCRIPTS = ("talk", "map", "turns", "list", "page", "start")
ASSETS = frozenset({"/page.css", *(f"/{name}.js" for name in SCRIPTS)})
# What says nothing of anybody. Everything else, unknown paths too, takes a key.
PUBLIC_PATHS = frozenset({"/", "/health"}) | ASSETS
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class AccessMiddleware:
    """Lets in who may ask, with heads and bodies that are not too large.

    Args:
        bodies: counts the bytes of bodies for as long as their requests are served.
    """

    def __init__(
        self, app: ASGIApp, door: Authenticator, bodies: BodyBudget, settings: HttpSettings
    ) -> None:
        self._app, self._door, self._bodies, self._settings = app, door, bodies, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        sent = _with_security_headers(send)
        try:
            tenant = self._admitted(scope)
        except ApiError as refusal:
            await error_responses.error_response(refusal)(scope, receive, sent)
            return
        with self._bodies.of(tenant) as held:
            await self._app(scope, self._limited(receive, held), sent)

    def _admitted(self, scope: Scope) -> str:
        """Whose request this is; nobody's where everybody may ask."""
        limit = self._settings.max_headers
        if len(scope["headers"]) > limit:
            said = f"The request has more than {limit} headers: send fewer."
            raise ApiError(said, 431, "request_header_fields_too_large")
        headers, tenant = Headers(scope=scope), NO_TENANT
        if scope["path"] not in PUBLIC_PATHS:
            client = scope.get("client")
            admitted = self._door.admit(headers, None if client is None else client[0])
            scope.setdefault("state", {})["principal"] = admitted
            tenant = admitted.name
        if "\n" in scope["path"]:  # routes end before it: "a\n" would be taken for "a"
            raise ApiError(
                "A name in a path must not hold the end of a line: leave %0A out.",
                400,
                "invalid_session_id",
            )
        told, limit = headers.get("content-length", "0"), self._settings.max_body_bytes
        if not told.isdecimal() or int(told[:20]) > limit:
            raise _too_large(limit)
        return tenant

    def _limited(self, receive: Receive, held: Reservation) -> Receive:
        limit = self._settings.max_body_bytes

        async def received() -> Message:
            message = await receive()
            count = len(message.get("body", b""))
            try:
                if held.bytes + count > limit:
                    raise _too_large(limit)
                self._bodies.extend(held, count)
            except ApiError as refusal:
                raise error_responses.BodyError(refusal) from refusal
            return message

        return received


def _too_large(limit: int) -> ApiError:
    said = f"The body is larger than {limit} bytes: send less at once."
    return ApiError(said, 413, "request_too_large")


def _with_security_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = message.get("headers", [])
            names = {name for name, _ in given}
            added = [(name, value) for name, value in SECURITY_HEADERS if name not in names]
            message = {**message, "headers": [*given, *added]}
        await send(message)

    return sent
