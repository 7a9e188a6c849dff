"""Routes whose JSON bodies are decoded into the fields of their model alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_args

from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response
from fastapi.routing import APIRoute

from larder.server.request import Refusal
from larder.server.web.desk import desk_of, tenant_of
from larder.server.web.refusing import BodyRefused
from larder.server.web.shapes import Body

Handler = Callable[[HttpRequest], Awaitable[Response]]


class JsonRequest(HttpRequest):
    """A request whose JSON is the model that it describes."""

    def __init__(self, http: HttpRequest, model: type[Body]) -> None:
        super().__init__(http.scope, http.receive)
        self._model = model

    async def json(self) -> Any:
        content = await self.body()
        try:
            return await desk_of(self).bodies.decode(tenant_of(self), self._model, content)
        except Refusal as refusal:
            raise BodyRefused(refusal) from refusal


class JsonRoute(APIRoute):
    """A route that decodes its body by `Bodies`, where it has one."""

    def get_route_handler(self) -> Callable[[HttpRequest], Any]:
        """The handler of the route's requests."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = _model_of(self.body_field.field_info.annotation)

        async def handled(http: HttpRequest) -> Response:
            return await handle(JsonRequest(http, model))

        return handled


def _model_of(annotation: Any) -> type[Body]:
    """The model of a body, which may be left out."""
    [model] = [each for each in (annotation, *get_args(annotation)) if _is_model(each)]
    return model


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Body)
