"""ASGI middleware for authentication, request limits and security headers."""

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
# Paths without tenant data. Everything else, unknown paths included, needs a key.
PUBLIC_PATHS = frozenset({"/", "/health", "/live"}) | ASSETS
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class AccessMiddleware:
    """Middleware that authenticates requests and limits their headers and bodies.

    Args:
        bodies: holds the reservation of a body while its request is served.
    """

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, bodies: BodyBudget, settings: HttpSettings
    ) -> None:
        self._app, self._authenticator = app, authenticator
        self._bodies, self._settings = bodies, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        secured_send = _with_security_headers(send)
        try:
            tenant = self._admitted(scope)
        except ApiError as refusal:
            response = error_responses.error_response(refusal, scope["path"])
            await response(scope, receive, secured_send)
            return
        with self._bodies.open_reservation(tenant) as reservation:
            await self._app(scope, self._limited(receive, reservation), secured_send)

    def _admitted(self, scope: Scope) -> str:
        """Tenant of an admitted request; NO_TENANT on public paths."""
        limit = self._settings.max_headers
        if len(scope["headers"]) > limit:
            message = f"The request has more than {limit} headers: send fewer."
            raise ApiError(message, 431, "request_header_fields_too_large")
        headers, tenant = Headers(scope=scope), NO_TENANT
        if scope["path"] not in PUBLIC_PATHS:
            client = scope.get("client")
            admitted = self._authenticator.admit(headers, None if client is None else client[0])
            scope.setdefault("state", {})["principal"] = admitted
            tenant = admitted.name
        if "\n" in scope["path"]:  # routes match up to it: "a\n" would match "a"
            raise ApiError(
                "A name in a path must not contain a line break: leave %0A out.",
                400,
                "invalid_session_id",
            )
        content_length, limit = headers.get("content-length", "0"), self._settings.max_body_bytes
        if not content_length.isdecimal() or int(content_length[:20]) > limit:
            raise _too_large(limit)
        return tenant

    def _limited(self, receive: Receive, reservation: Reservation) -> Receive:
        limit = self._settings.max_body_bytes

        async def limited_receive() -> Message:
            message = await receive()
            count = len(message.get("body", b""))
            try:
                if reservation.bytes + count > limit:
                    raise _too_large(limit)
                self._bodies.extend(reservation, count)
            except ApiError as refusal:
                raise error_responses.BodyError(refusal) from refusal
            return message

        return limited_receive


def _too_large(limit: int) -> ApiError:
    message = f"The body is larger than {limit} bytes: send less at once."
    return ApiError(message, 413, "request_too_large")


def _with_security_headers(send: Send) -> Send:
    async def secured_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", [])
            names = {name for name, _ in headers}
            added = [(name, value) for name, value in SECURITY_HEADERS if name not in names]
            message = {**message, "headers": [*headers, *added]}
        await send(message)

    return secured_send
