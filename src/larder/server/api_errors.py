"""Why a request is not served, each reason with its status and code."""

from __future__ import annotations

from larder.core.errors import InputError, LarderError, StoreSlow
from larder.core.session_name import check_session_name
from larder.server.request import ApiError
from larder.store.failures import failure_reason

SOON_SECONDS = 1.0


def invalid_request(message: str, param: str | None = None) -> ApiError:
    """The request makes no sense."""
    return ApiError(message, 400, "invalid_request", param)


def validate_session_name(name: str, param: str = "session") -> str:
    """The name itself.

    Raises:
        Refusal: 400 `invalid_session_id`: no session may be called so.
    """
    try:
        check_session_name(name, param)
    except InputError as error:
        raise ApiError(str(error), 400, "invalid_session_id", param) from error
    return name


def kv_budget_exceeded(error: Exception) -> ApiError:
    """It needs more memory than it may ever have."""
    return ApiError(str(error), 400, "kv_budget_exceeded")


def context_length_exceeded(tokens: int, context_tokens: int) -> ApiError:
    """The text is longer than the model can read."""
    return ApiError(
        f"The conversation has {tokens} tokens, but the model reads {context_tokens} with the "
        "answer: shorten it.",
        400,
        "context_length_exceeded",
        "messages",
    )


def text_too_long(characters: int, limit: int, param: str) -> ApiError:
    """The text is so long that taking it apart would keep others waiting for nothing."""
    return ApiError(
        f"The text has {characters} characters, but {limit} are more than the model can read: "
        "shorten it.",
        400,
        "context_length_exceeded",
        param,
    )


def session_not_found(name: str) -> ApiError:
    """There is no such session; another tenant's is none."""
    return ApiError(
        f"There is no session {name!r}: list those there are, or open it.",
        404,
        "session_not_found",
    )


def session_busy(name: str) -> ApiError:
    """The session is answering."""
    return ApiError(
        f"Session {name!r} is answering another request: wait for its end, or fork the session.",
        409,
        "session_busy",
        retry_after=SOON_SECONDS,
    )


def turn_not_durable(error: LarderError) -> ApiError:
    """The store did not take the turn, and nothing is to be answered that it does not have."""
    return ApiError(
        f"The server's store did not take the turn ({failure_reason(error)}), so there is none: "
        "the "
        "session is as it was before. Tell whoever runs the server, and ask again.",
        503,
        "store_full",
        retry_after=SOON_SECONDS if isinstance(error, StoreSlow) else None,
    )


def session_held(name: str, seconds: float) -> ApiError:
    """Another server answers in the session, or did until it fell silent."""
    return ApiError(
        f"Session {name!r} is answering at another server: wait for its end, or fork the session.",
        409,
        "session_held",
        retry_after=seconds,
    )


def session_superseded(name: str) -> ApiError:
    """Another server has gone on with the session meanwhile."""
    return ApiError(
        f"Session {name!r} has gone on elsewhere: send the request again.",
        409,
        "session_superseded",
        retry_after=SOON_SECONDS,
    )


def session_exists(name: str) -> ApiError:
    """There is a session of that name."""
    return ApiError(
        f"There is a session {name!r} already: take another name, or remove it first.",
        409,
        "session_exists",
    )


def overloaded(waiting: int) -> ApiError:
    """Too many wait already."""
    return ApiError(
        f"{waiting} requests are waiting, as many as may: try again later.",
        503,
        "overloaded",
        retry_after=SOON_SECONDS,
    )


def too_many_requests(waiting: int) -> ApiError:
    """Too many of one tenant wait already, but others have room."""
    return ApiError(
        f"{waiting} of your requests are waiting, as many as may while others have room: wait for "
        "some of them to end.",
        429,
        "too_many_requests",
        retry_after=SOON_SECONDS,
    )


def server_stopping() -> ApiError:
    """The server stops."""
    return ApiError("The server is stopping: try again later.", 503, "stopping", retry_after=5.0)
