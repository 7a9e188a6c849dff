"""What every endpoint works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from anyio import CapacityLimiter
from fastapi.requests import Request as HttpRequest

from larder.engine.sampler import SamplingParams
from larder.server.engine_client import EngineClient, ServedModel
from larder.server.http.archive import Archive
from larder.server.http.auth import Principal
from larder.server.http.body_budget import BodyBudget
from larder.server.http.error_responses import not_found
from larder.server.http.metrics import Metrics
from larder.server.http.session_hint import SESSION_HEADERS


@dataclass(frozen=True)
class HttpSettings:
    """How the server behaves towards clients.

    Args:
        max_body_bytes: of a request's body, imported sessions included.
        body_budget_bytes: of all bodies and of what they are decoded to; a tenant may take half.
        max_head_bytes: of a request line with its headers.
        max_headers: of a request.
        request_seconds: until a request has arrived; more for what has come of it, see below.
        request_bytes_per_second: of a request that takes longer.
        max_connections: that are answered at a time; half of them may be waiting for requests.
        ping_seconds: of silence after which a stream says that it is alive.
        session_headers: that may name a session, the most telling first.
        sampling: of requests that say nothing of it.
        max_new_tokens: likewise.
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


@dataclass(frozen=True)
class AppState:
    """A server's parts, shared by all requests."""

    hub: EngineClient
    archive: Archive
    bodies: BodyBudget
    gauges: Metrics
    settings: HttpSettings
    # Of their own: those that answers wait in may all be taken.
    health_threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(4))

    def check_model(self, name: str | None) -> ServedModel:
        """The model of a name; the only one where none is named.

        Raises:
            Refusal: 404 `model_not_found`.
        """
        served = self.hub.models()
        for each in served:
            if name is None or each.name == name:
                return each
        known = ", ".join(repr(each.name) for each in served)
        raise not_found(
            f"There is no model {str(name)[:200]!r} here: ask {known}.", "model_not_found", "model"
        )


def app_state(http: HttpRequest) -> AppState:
    """The desk of the server that got a request."""
    return http.app.state.desk


def principal_of(http: HttpRequest) -> Principal:
    """Who asks."""
    return http.scope["state"]["principal"]


def tenant_of(http: HttpRequest) -> str:
    """Whose sessions a request may see."""
    return principal_of(http).name
