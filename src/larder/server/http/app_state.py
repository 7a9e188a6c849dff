"""State of the HTTP application that every endpoint shares, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from anyio import CapacityLimiter
from fastapi.requests import Request as HttpRequest

from larder.engine.sampler import SamplingParams
from larder.server.embedder_queue import EmbedderQueue
from larder.server.engine_client import EngineClient
from larder.server.http.archive import Archive
from larder.server.http.auth import Principal
from larder.server.http.body_budget import BodyBudget
from larder.server.http.metrics import Metrics
from larder.server.request import ApiError, Arrival
from larder.server.session_info import ServedModel

NO_ARRIVAL = Arrival()
# Session headers of several kinds of clients; the first one counts.
SESSION_HEADERS = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "x-grok-conv-id",
    "x-openwebui-chat-id",
)


class Unsupported(Enum):
    """Treatment of unsupported fields and parts of schemas that would change the answer."""

    REFUSED = "refused with 400"
    IGNORED = "ignored, and named in the warnings of the answer"


@dataclass(frozen=True)
class HttpSettings:
    """Limits and defaults of the HTTP front end.

    Args:
        max_body_bytes: largest request body, imported sessions included.
        body_budget_bytes: memory of all bodies and their decoded values; a tenant may use half.
        max_head_bytes: largest request line with headers.
        max_headers: most headers of a request.
        request_seconds: time in which a request must arrive, plus the time that its received
            bytes take at `request_bytes_per_second`.
        request_bytes_per_second: minimum upload rate of a request that takes longer.
        max_connections: open connections; at most half may be waiting for a request.
        ping_seconds: idle time of a stream before it sends a ping comment.
        session_headers: headers that may name a session, in order of precedence.
        sampling: default sampling parameters.
        max_new_tokens: default length limit of an answer.
        unsupported: what becomes of what is not supported.
    """

    max_body_bytes: int = 8 << 20
    body_budget_bytes: int = 512 << 20
    max_head_bytes: int = 64 << 10
    max_headers: int = 128
    request_seconds: float = 10.0
    request_bytes_per_second: int = 64 << 10
    max_connections: int = 512
    ping_seconds: float = 10.0
    session_headers: tuple[str, ...] = SESSION_HEADERS
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    unsupported: Unsupported = Unsupported.REFUSED


@dataclass(frozen=True)
class AppState:
    """Components of a server, shared by all requests; without an embedder it embeds no texts."""

    client: EngineClient
    archive: Archive
    bodies: BodyBudget
    metrics: Metrics
    settings: HttpSettings
    embedder: EmbedderQueue | None = None
    # Separate from the default thread pool, whose threads may all be waiting for answers.
    health_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(4))

    def check_model(self, name: str | None) -> ServedModel:
        """Served model with this name; the first one if `name` is None.

        Raises:
            ApiError: 404 `model_not_found`.
        """
        served = self.client.models()
        for each in served:
            if name is None or each.name == name:
                return each
        known = ", ".join(repr(each.name) for each in served)
        message = f"There is no model {str(name)[:200]!r} here: use {known}."
        raise ApiError(message, 404, "model_not_found", "model")


def app_state(http: HttpRequest) -> AppState:
    """Application state of the server that received a request."""
    return http.app.state.larder


def announce_request(http: HttpRequest) -> None:
    """Announce a request to the engine, whose body is there; `arrival_of` ends it."""
    if "arrival" not in http.scope["state"]:
        http.scope["state"]["arrival"] = app_state(http).client.arrival()


def arrival_of(http: HttpRequest) -> Arrival:
    """Announcement of a request, to be ended once it is submitted."""
    return http.scope["state"].get("arrival", NO_ARRIVAL)


def principal_of(http: HttpRequest) -> Principal:
    """Authenticated principal of a request."""
    return http.scope["state"]["principal"]


def tenant_of(http: HttpRequest) -> str:
    """Tenant of a request: only its sessions are visible."""
    return principal_of(http).name
