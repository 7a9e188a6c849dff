"""Constructors of API errors, each with its HTTP status and code."""

from __future__ import annotations

from larder.core.errors import InputError, LarderError, StoreSlow
from larder.core.session_name import check_session_name
from larder.server.request import ApiError
from larder.store.failures import failure_reason

SOON_SECONDS = 1.0


def invalid_request(
    message: str, param: str | None = None, code: str = "invalid_request"
) -> ApiError:
    """400 `invalid_request`, or another code: a field of the request is malformed."""
    return ApiError(message, 400, code, param)


def validate_session_name(name: str, param: str = "session") -> str:
    """The name, if it is valid.

    Raises:
        ApiError: 400 `invalid_session_id`.
    """
    try:
        check_session_name(name, param)
    except InputError as error:
        raise ApiError(str(error), 400, "invalid_session_id", param) from error
    return name


def kv_budget_exceeded(error: Exception) -> ApiError:
    """400 `kv_budget_exceeded`: more memory than the budget can ever grant."""
    return ApiError(str(error), 400, "kv_budget_exceeded")


def context_length_exceeded(tokens: int, context_tokens: int) -> ApiError:
    """400 `context_length_exceeded`: more tokens than the model's context."""
    return ApiError(
        f"The conversation has {tokens} tokens, but the model reads {context_tokens} with the "
        "answer: shorten it.",
        400,
        "context_length_exceeded",
        "messages",
    )


def text_too_long(characters: int, limit: int, param: str) -> ApiError:
    """400 `context_length_exceeded`: too long to be tokenized at all, which would delay other
    requests."""
    return ApiError(
        f"The text has {characters} characters, more than the {limit} that the model can read: "
        "shorten it.",
        400,
        "context_length_exceeded",
        param,
    )


def session_not_found(name: str) -> ApiError:
    """404 `session_not_found`; also for sessions of other tenants."""
    return ApiError(
        f"There is no session {name!r}: list the sessions, or create it.", 404, "session_not_found"
    )


def session_busy(name: str) -> ApiError:
    """409 `session_busy`: the session is answering another request."""
    return ApiError(
        f"Session {name!r} is answering another request: wait for its end, or fork the session.",
        409,
        "session_busy",
        retry_after=SOON_SECONDS,
    )


def turn_not_durable(error: LarderError) -> ApiError:
    """503 `store_full`: the store did not accept the turn, and strict durability rolls it back."""
    return ApiError(
        f"The server's store did not accept the turn ({failure_reason(error)}), so it was rolled "
        "back: the session is unchanged. Inform the operator of the server, and try again.",
        503,
        "store_full",
        retry_after=SOON_SECONDS if isinstance(error, StoreSlow) else None,
    )


def session_held(name: str, seconds: float) -> ApiError:
    """409 `session_held`: another server holds the session's lease."""
    return ApiError(
        f"Session {name!r} is answering on another server: wait for its end, or fork the session.",
        409,
        "session_held",
        retry_after=seconds,
    )


def session_superseded(name: str) -> ApiError:
    """409 `session_superseded`: another server has written a newer state of the session."""
    return ApiError(
        f"Session {name!r} was continued by another server: send the request again.",
        409,
        "session_superseded",
        retry_after=SOON_SECONDS,
    )


def session_exists(name: str) -> ApiError:
    """409 `session_exists`: the name is taken."""
    return ApiError(
        f"Session {name!r} exists already: choose another name, or remove it first.",
        409,
        "session_exists",
    )


def overloaded(waiting: int) -> ApiError:
    """503 `overloaded`: the request queue is full."""
    return ApiError(
        f"{waiting} requests are waiting, and the queue is full: try again later.",
        503,
        "overloaded",
        retry_after=SOON_SECONDS,
    )


def memory_in_use(name: str) -> ApiError:
    """503 `overloaded`: answers or writes in progress leave no memory for a session's cache."""
    return ApiError(
        f"Answers or writes in progress leave no memory for the cache of session {name!r}: try "
        "again later.",
        503,
        "overloaded",
        retry_after=SOON_SECONDS,
    )


def too_many_requests(waiting: int) -> ApiError:
    """429 `too_many_requests`: the tenant's share of the request queue is full."""
    return ApiError(
        f"{waiting} of your requests are waiting, your share of the queue: wait for some of them "
        "to end.",
        429,
        "too_many_requests",
        retry_after=SOON_SECONDS,
    )


def server_stopping() -> ApiError:
    """503 `stopping`: the server is shutting down."""
    return ApiError("The server is stopping: try again later.", 503, "stopping", retry_after=5.0)
