"""What stands before every endpoint: who asks, and how much may be sent."""

from __future__ import annotations

from fastapi.datastructures import Headers
from fastapi.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from larder.server.request import Refusal
from larder.server.tenants import Door
from larder.server.web import refusing

SCRIPTS = ("talk", "map", "turns", "list", "page", "start")
ASSETS = frozenset({"/page.css", *(f"/{name}.js" for name in SCRIPTS)})
# What says nothing of anybody. Everything else, unknown paths too, takes a key.
OPEN = frozenset({"/", "/health"}) | ASSETS
SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """Lets in who may ask, with bodies that are not too large.

    Args:
        max_body_bytes: of a request.
    """

    def __init__(self, app: ASGIApp, door: Door, max_body_bytes: int) -> None:
        self._app, self._door, self._max_body_bytes = app, door, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        sent = _safely(send)
        try:
            self._check(scope)
        except Refusal as refusal:
            await refusing.response(refusal)(scope, receive, sent)
            return
        await self._app(scope, self._limited(receive), sent)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN:
            client = scope.get("client")
            admitted = self._door.admit(headers, None if client is None else client[0])
            scope.setdefault("state", {})["principal"] = admitted
        if "\n" in scope["path"]:  # routes end before it: "a\n" would be taken for "a"
            raise Refusal(
                "A name in a path must not hold the end of a line: leave %0A out.",
                400,
                "invalid_session_id",
            )
        told = headers.get("content-length", "0")
        if not told.isdecimal() or int(told[:20]) > self._max_body_bytes:
            raise Refusal(self._too_large(), 413, "request_too_large")

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def received() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return received

    def _too_large(self) -> str:
        return f"The body is larger than {self._max_body_bytes} bytes: send less at once."


def _safely(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = message.get("headers", [])
            names = {name for name, _ in given}
            added = [(name, value) for name, value in SAFE if name not in names]
            message = {**message, "headers": [*given, *added]}
        await send(message)

    return sent
