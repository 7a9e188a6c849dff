"""FastAPI route that decodes JSON bodies within the body budget."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, get_args

from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response
from fastapi.routing import APIRoute

from larder.server.http.app_state import app_state, tenant_of
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


class JsonRoute(APIRoute):
    """Route that decodes its body, if it has one, by `BodyBudget`."""

    def get_route_handler(self) -> Callable[[HttpRequest], Any]:
        """Request handler of the route."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = _model_of(self.body_field.field_info.annotation)

        async def handled(http: HttpRequest) -> Response:
            return await handle(JsonRequest(http, model))

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
