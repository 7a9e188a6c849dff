"""Error responses in OpenAI's form: status, body and retry headers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as BareHTTPException
from starlette.routing import Match

from larder.core.errors import (
    BadParameter,
    BudgetError,
    Damaged,
    InputError,
    LarderError,
    StoreFull,
    StoreSlow,
    Superseded,
    UsageError,
)
from larder.server.api_errors import invalid_request
from larder.server.request import ApiError

LOG = logging.getLogger(__name__)
INVALID_REQUEST = "invalid_request"
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
# Paths whose errors are in Anthropic's form, and the types of errors there.
MESSAGES_PATH = "/v1/messages"
MESSAGES_ERROR_TYPES = ERROR_TYPES | {413: "request_too_large", 503: "overloaded_error"}
LOCATION_TYPES = frozenset({"body", "str", "int", "path", "query"})
FRAMEWORK_CODES = {404: "not_found", 405: "method_not_allowed"}
# Statuses that clients retry by default.
RETRIED_STATUSES = (408, 409, 429)
# Status, code and seconds to wait by error class; the first match counts.
STATUSES: Sequence[tuple[type[LarderError], int, str, float | None]] = (
    (StoreSlow, 503, "store_slow", 1.0),
    (StoreFull, 503, "store_full", None),
    (Damaged, 500, "store_damaged", None),
    (Superseded, 409, "lease_lost", 1.0),
    (BudgetError, 400, "kv_budget_exceeded", None),
    (BadParameter, 400, INVALID_REQUEST, None),
    (UsageError, 400, INVALID_REQUEST, None),
    (InputError, 400, INVALID_REQUEST, None),
)
# Messages about the store without paths of the server.
PUBLIC_MESSAGES = {
    "store_slow": "The server's store does not respond: try again.",
    "store_full": "The server's store is full: tell the operator.",
    "store_damaged": "The stored data of this request is damaged: tell the operator.",
}


class BodyError(HTTPException):
    """ApiError raised while a body is read; FastAPI propagates only its own errors from there."""

    def __init__(self, refusal: ApiError) -> None:
        super().__init__(refusal.status, str(refusal))
        self.refusal = refusal


def malformed_field(steps: Sequence[int | str], reason: str) -> ApiError:
    """400 error about a value that does not match the schema.

    Args:
        steps: path from the body to the value.
    """
    path = ".".join(map(str, field_steps(steps)))[:200] or None
    message = f"{path or 'The body'}: {reason.removeprefix('Value error, ')}."
    return invalid_request(message.encode("utf-8", "replace").decode(), path)


def as_api_error(error: Exception) -> ApiError:
    """ApiError for clients of any exception, without internal details."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code, retry_after in STATUSES:
        if isinstance(error, kind):
            message = PUBLIC_MESSAGES.get(code) or " ".join(str(error).split())
            return ApiError(message, status, code, retry_after=retry_after)
    return ApiError(
        "Internal server error; the server's log has the details.", 500, "internal_error"
    )


def logged_api_error(error: Exception) -> ApiError:
    """`as_api_error`; unexpected errors are logged."""
    if not isinstance(error, LarderError):
        LOG.error("A request has failed.", exc_info=error)
    return as_api_error(error)


def error_body(refusal: ApiError) -> dict[str, Any]:
    """JSON body of an error."""
    return {
        "error": {
            "message": str(refusal),
            "type": ERROR_TYPES.get(refusal.status, _error_type(refusal.status)),
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def messages_error_body(refusal: ApiError) -> dict[str, Any]:
    """JSON body of an error in Anthropic's form."""
    default = "api_error" if refusal.status >= 500 else "invalid_request_error"
    kind = MESSAGES_ERROR_TYPES.get(refusal.status, default)
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


def error_response(refusal: ApiError, path: str = "") -> JSONResponse:
    """Complete HTTP response of an error.

    Args:
        path: of the request, which decides the form of the body.
    """
    headers: dict[str, str] = {}
    if refusal.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(refusal.retry_after)))
    elif refusal.status in RETRIED_STATUSES or refusal.status >= 500:
        headers["x-should-retry"] = "false"
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    is_message = path.startswith(MESSAGES_PATH)
    body = messages_error_body(refusal) if is_message else error_body(refusal)
    return JSONResponse(body, refusal.status, headers)


async def on_larder_error(request: HttpRequest, error: Exception) -> JSONResponse:
    """Handler of LarderErrors."""
    return error_response(as_api_error(error), request.url.path)


async def on_http_error(request: HttpRequest, error: Exception) -> JSONResponse:
    """Handler of framework errors: unknown paths, methods, broken bodies."""
    if isinstance(error, BodyError):
        return error_response(error.refusal, request.url.path)
    assert isinstance(error, BareHTTPException)
    code = FRAMEWORK_CODES.get(error.status_code, INVALID_REQUEST)
    path, headers = request.url.path, error.headers or {}
    message = f"{error.detail}.".replace("..", ".")
    if error.status_code == 404:
        message = f"There is nothing at {path[:100]}: {_near_path(request)}"
    elif error.status_code == 405:
        allowed = headers.get("allow") or headers.get("Allow") or "another method"
        message = f"{request.method} is not allowed at {path[:100]}: use {allowed}."
    response = error_response(ApiError(message, error.status_code, code), path)
    response.headers.update(headers)
    return response


async def on_validation_error(request: HttpRequest, error: Exception) -> JSONResponse:
    """Handler of bodies and parameters that do not match the schema of the endpoint."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["loc"] == ("body",):  # what is no object is refused before
        refusal = invalid_request("The body is empty, or null: send a JSON object.")
    else:
        refusal = malformed_field(first["loc"], first["msg"])
    return error_response(refusal, request.url.path)


async def on_unexpected_error(request: HttpRequest, error: Exception) -> JSONResponse:
    """Handler of unexpected exceptions; clients get no internal details."""
    return error_response(as_api_error(error), request.url.path)


def _near_path(request: HttpRequest) -> str:
    """Known path that a request to an unknown one may have meant."""
    path = request.url.path
    meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    scope = {**request.scope, "path": meant}
    if any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes):
        return f"send it to {meant}. The base URL of OpenAI's clients ends with one /v1."
    return "GET /openapi.json lists the endpoints."


def field_steps(steps: Sequence[int | str]) -> list[int | str]:
    """Steps of a path that are names of fields, or list indices."""
    return [step for step in steps if _is_field(step)]


def _is_field(part: int | str) -> bool:
    """True if a path step is a field name or a list index; other steps name types."""
    return isinstance(part, int) or (
        part.isidentifier() and part.islower() and part not in LOCATION_TYPES
    )


def _error_type(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"
