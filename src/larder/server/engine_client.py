"""Interface of the inference engine to HTTP, tests and cluster replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ParamSpec, TypeVar

from larder.server import operations
from larder.server.operation import Operation
from larder.server.request import Listener, Request, Ticket

P = ParamSpec("P")
R = TypeVar("R")


class EngineClient(ABC):
    """Sessions of many tenants over one model. Safe from any thread.

    Sessions of other tenants are treated as unknown. `operations.py` documents the operations;
    those named here can be called as methods, all others with `call`.
    """

    @abstractmethod
    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Queue a request; text, report and errors go to the listener.

        Raises:
            ApiError: 400 `kv_budget_exceeded`, `context_length_exceeded` or `invalid_request`; 404
                `session_not_found` for `follows`; 409 `session_busy`; 429 `too_many_requests`; 503
                `overloaded`.
        """

    @abstractmethod
    def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an operation where the model is.

        Raises:
            ApiError: as the operation.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop accepting requests, cancel those in progress, and release all resources."""

    models = operations.models
    tokenize = operations.tokenize
    detokenize = operations.detokenize
    tokenizer_info = operations.tokenizer_info
    stats = operations.stats
    is_healthy = operations.is_healthy
    problems = operations.problems
    sessions = operations.sessions
    session = operations.session
    kept = operations.kept
    open = operations.open
    pin = operations.pin
    unpin = operations.unpin
    release = operations.release
    prefetch = operations.prefetch
    compact = operations.compact
    fork = operations.fork
    export = operations.export
    import_ = operations.import_
    remove = operations.remove
