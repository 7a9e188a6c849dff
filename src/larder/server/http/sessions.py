"""Session endpoints, `/v1/sessions`: one for each operation that has an endpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from larder.core.session_name import RESERVED_ENDS
from larder.server.api_errors import validate_session_name
from larder.server.http.app_state import app_state, tenant_of
from larder.server.http.json_route import JsonRoute
from larder.server.operation import Endpoint, Operation
from larder.server.operations import OPERATIONS, SESSION

KEYWORD = inspect.Parameter.KEYWORD_ONLY
HTTP = inspect.Parameter("http", KEYWORD, annotation=HttpRequest)


def operations_router(operations: Iterable[Operation[..., Any]]) -> APIRouter:
    """Routes of the operations that have an endpoint.

    Raises:
        ValueError: an endpoint would shadow sessions whose names end as its path does.
    """
    router = APIRouter(tags=["sessions"], route_class=JsonRoute)
    endpoints = [(each.endpoint, each) for each in operations if each.endpoint is not None]
    session_methods = {each.method for each, _ in endpoints if each.path == SESSION}
    for endpoint, operation in endpoints:
        _, is_below, end = endpoint.path.partition(f"{SESSION}/")
        if is_below and endpoint.method in session_methods and f"/{end}" not in RESERVED_ENDS:
            raise ValueError(
                f"{endpoint.method} {endpoint.path} of operation {operation.name!r} would shadow "
                f"sessions whose names end with '/{end}': add that to RESERVED_ENDS."
            )
    # Names of sessions contain slashes: the path of a session matches all longer ones, too.
    for endpoint, operation in sorted(endpoints, key=lambda each: each[0].path == SESSION):
        function = endpoint_function(operation, endpoint)
        router.add_api_route(endpoint.path, function, methods=[endpoint.method])
    return router


def endpoint_function(operation: Operation[..., Any], endpoint: Endpoint) -> Callable[..., Any]:
    """Function of a route, with the signature that FastAPI derives the request's schema from."""
    parameters = [each for each in operation.parameters if each.name != "tenant"]
    if any(each.annotation is bytes for each in parameters):
        function = _upload_function(operation, endpoint)
        parameters = [each for each in parameters if each.annotation is not bytes]
    else:
        function = _call_function(operation, endpoint)
    if endpoint.body is not None:
        body = inspect.Parameter("body", KEYWORD, default=None, annotation=endpoint.body | None)
        parameters = [*(each for each in parameters if each.name == "name"), body]
    parameters = [HTTP, *(each.replace(kind=KEYWORD) for each in parameters)]
    function.__name__ = endpoint.name or operation.name
    function.__doc__ = operation.description
    function.__signature__ = inspect.Signature(parameters, return_annotation=Response)
    return function


def _call_function(operation: Operation[..., Any], endpoint: Endpoint) -> Any:
    def call(http: HttpRequest, **arguments: Any) -> Response:
        if endpoint.body is not None:
            body = arguments.pop("body")
            arguments |= {} if body is None else body.arguments()
        act, name = _bound(http, operation, arguments)
        return _response(endpoint.response(name, act()), name)

    return call


def _upload_function(operation: Operation[..., Any], endpoint: Endpoint) -> Any:
    async def upload(http: HttpRequest, **arguments: Any) -> Response:
        content = await http.body()
        act, name = _bound(http, operation, arguments)
        result = await app_state(http).bodies.run_import(tenant_of(http), partial(act, content))
        return _response(endpoint.response(name, result), name)

    return upload


def _bound(
    http: HttpRequest, operation: Operation[..., Any], arguments: dict[str, Any]
) -> tuple[Callable[..., Any], str]:
    """Operation of the request's tenant on the session of its path, and the session's name."""
    call = partial(app_state(http).client.call, operation, tenant_of(http))
    if "name" not in arguments:
        return partial(call, **arguments), ""
    name = validate_session_name(arguments.pop("name"), "name")
    return partial(call, name, **arguments), name


def _response(value: Any, name: str) -> Response:
    if not isinstance(value, bytes):
        return JSONResponse(value)
    disposition = f"attachment; filename*=UTF-8''{quote(name, safe='')}.larder"
    headers = {"content-disposition": disposition}
    return Response(value, media_type="application/octet-stream", headers=headers)


router = operations_router(OPERATIONS.values())
