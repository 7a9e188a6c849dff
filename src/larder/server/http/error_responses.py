"""Errors as OpenAI's clients understand them: a status, a body, and whether to try again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.requests import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as BareHTTPException

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
from larder.server.request import ApiError

INVALID_REQUEST = "invalid_request"
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
LOCATION_TYPES = frozenset({"body", "str", "int", "path", "query"})
FRAMEWORK_CODES = {404: "not_found", 405: "method_not_allowed"}


class BodyError(HTTPException):
    """A refusal while a body is read: FastAPI hands on no error but its own from there."""

    def __init__(self, refusal: ApiError) -> None:
        super().__init__(refusal.status, str(refusal))
        self.refusal = refusal


# What clients try again by themselves, unless they are told not to.
RETRIED_STATUSES = (408, 409, 429)
# The first that an error is one of says what becomes of it: status, code, seconds to wait.
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


# What clients are told of the server's disk: where it lies is nobody's business.
PUBLIC_MESSAGES = {
    "store_slow": "The server's disk does not answer: try again.",
    "store_full": "The server's disk takes no more: tell whoever runs it.",
    "store_damaged": "What the server has kept of this is damaged: tell whoever runs it.",
}


def invalid_field(message: str, param: str | None = None, code: str = INVALID_REQUEST) -> ApiError:
    """A request that will never do as it is."""
    return ApiError(message, 400, code, param)


def malformed_field(steps: Sequence[int | str], why: str) -> ApiError:
    """A value that does not have the form of its field.

    Args:
        steps: from the body to the value.
    """
    place = ".".join(str(step) for step in steps if _is_field(step))[:200] or None
    said = f"{place or 'The body'}: {why}."
    return invalid_field(said.encode("utf-8", "replace").decode(), place)


def not_found(message: str, code: str, param: str | None = None) -> ApiError:
    """Something that is not there, or not for who asks: the two are told alike."""
    return ApiError(message, 404, code, param)


def as_api_error(error: Exception) -> ApiError:
    """Any error as one for clients; what is nobody's business but ours is not in it."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code, retry_after in STATUSES:
        if isinstance(error, kind):
            said = PUBLIC_MESSAGES.get(code) or " ".join(str(error).split())
            return ApiError(said, status, code, retry_after=retry_after)
    return ApiError("The server has failed; its log says why.", 500, "internal_error")


def error_body(refusal: ApiError) -> dict[str, Any]:
    """The JSON of an error."""
    return {
        "error": {
            "message": str(refusal),
            "type": ERROR_TYPES.get(refusal.status, _error_type(refusal.status)),
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def error_response(refusal: ApiError) -> JSONResponse:
    """An error as a whole response."""
    headers: dict[str, str] = {}
    if refusal.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(refusal.retry_after)))
    elif refusal.status in RETRIED_STATUSES or refusal.status >= 500:
        headers["x-should-retry"] = "false"
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(refusal), refusal.status, headers)


async def on_larder_error(request: HttpRequest, error: Exception) -> JSONResponse:
    """Errors of ours."""
    return error_response(as_api_error(error))


async def on_http_error(request: HttpRequest, error: Exception) -> JSONResponse:
    """Errors of the framework: unknown paths, methods, broken bodies."""
    if isinstance(error, BodyError):
        return error_response(error.refusal)
    assert isinstance(error, BareHTTPException)
    code = FRAMEWORK_CODES.get(error.status_code, INVALID_REQUEST)
    told = error_response(ApiError(f"{error.detail}.".replace("..", "."), error.status_code, code))
    told.headers.update(error.headers or {})
    return told


async def on_validation_error(request: HttpRequest, error: Exception) -> JSONResponse:
    """A body or a parameter that does not have the form of the endpoint."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return error_response(malformed_field(first["loc"], first["msg"]))


async def on_unexpected_error(request: HttpRequest, error: Exception) -> JSONResponse:
    """What should not have happened: the client learns nothing of the inside."""
    return error_response(as_api_error(error))


def _is_field(part: int | str) -> bool:
    """Whether a step towards what is wrong is a field's name or a place in a list; other steps
    name types."""
    return isinstance(part, int) or (
        part.isidentifier() and part.islower() and part not in LOCATION_TYPES
    )


def _error_type(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"
