"""FastAPI route that decodes JSON bodies within the body budget."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, get_args

from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response
from fastapi.routing import APIRoute

from larder.server.http.app_state import announce_request, app_state, arrival_of, tenant_of
from larder.server.http.error_responses import BodyError
from larder.server.http.json_body import JsonBody
from larder.server.request import ApiError

_JSON_TYPE = re.compile(r"application/([^/]+\+)?json")
Handler = Callable[[HttpRequest], Awaitable[Response]]


class JsonRequest(HttpRequest):
    """Request whose `json()` is an instance of its model."""

    def __init__(self, http: HttpRequest, model: type[JsonBody]) -> None:
        super().__init__(http.scope, http.receive)
        self._model = model

    async def body(self) -> bytes:
        content = await super().body()
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content and _JSON_TYPE.fullmatch(kind) is None:
            raise BodyError(_no_json(kind))
        return content

    async def json(self) -> Any:
        content = await self.body()
        try:
            return await app_state(self).bodies.decode(tenant_of(self), self._model, content)
        except ApiError as refusal:
            raise BodyError(refusal) from refusal


class PromptRequest(JsonRequest):
    """Request with a prompt, which is announced to the engine once its body is there."""

    async def body(self) -> bytes:
        content = await super().body()
        announce_request(self)
        return content


class JsonRoute(APIRoute):
    """Route that decodes its body, if it has one, by `BodyBudget`."""

    request_class: ClassVar[type[JsonRequest]] = JsonRequest

    def get_route_handler(self) -> Callable[[HttpRequest], Any]:
        """Request handler of the route."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = _model_of(self.body_field.field_info.annotation)

        async def handled(http: HttpRequest) -> Response:
            return await handle(self.request_class(http, model))

        return handled


class PromptRoute(JsonRoute):
    """Route of requests with a prompt, so that prompts that come at once are read together."""

    request_class = PromptRequest

    def get_route_handler(self) -> Callable[[HttpRequest], Any]:
        """Request handler of the route."""
        handle = super().get_route_handler()

        async def handled(http: HttpRequest) -> Response:
            try:
                return await handle(http)
            finally:
                arrival_of(http).end()

        return handled


def _no_json(kind: str) -> ApiError:
    """415 `unsupported_media_type`."""
    given = f"the type {kind[:100]}" if kind else "no type"
    return ApiError(
        f"The body has {given}: send JSON with the header 'content-type: application/json'.",
        415,
        "unsupported_media_type",
    )


def _model_of(annotation: Any) -> type[JsonBody]:
    """Model of a body annotation, which may be optional."""
    [model] = [each for each in (annotation, *get_args(annotation)) if _is_model(each)]
    return model


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, JsonBody)
