"""Interface of the inference engine to HTTP, tests and cluster replicas, and the client over an
engine core in this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import ParamSpec, TypeVar

from larder.core.errors import LarderError
from larder.engine.engine import Engine
from larder.server import operations
from larder.server.answer_form import AnswerForm, default_tool_parser
from larder.server.engine_context import EngineContext
from larder.server.engine_core import MAX_DUE, EngineCore
from larder.server.engine_options import EngineOptions
from larder.server.operation import Operation
from larder.server.persistence.base import SessionPersistence
from larder.server.request import ApiError, Arrival, Listener, Request, Ticket
from larder.server.response_cache import NO_CATEGORIES, ResponseCache, ResponseCategory
from larder.server.tiers.disk import DiskTier
from larder.store.ledger import Tier

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

    def arrival(self) -> Arrival:
        """Announce a request that is submitted soon, so that its prompt may be read together with
        that of another one; to be ended once it is, or will not be."""
        return Arrival()

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


class LocalEngineClient(EngineClient):
    """Serves an engine's model under its policy. Safe from any thread.

    The engine must not be used by others meanwhile.

    Args:
        options: memory, scheduling and names of the model.
        persistence: stores finished turns.
        disk: stores caches that are not in use.
        tool_parser: parser of tool calls; empty for none, None for that of the chat template.
        reasoning_parser: parser of the reasoning; empty for none.
        response_categories: categories of the response cache by name; none for no such cache.
        step_lock: held during a step, by several models that take turns.

    Raises:
        UsageError: the policy cannot be served, or the model does not read `max_model_len` tokens.
        BadParameter: `inter_token_seconds` is out of range.
        UnknownName, DependencyError, ModelError: an embedder of a category cannot be loaded.
    """

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions = EngineOptions(),  # noqa: B008, frozen
        *,
        persistence: SessionPersistence | None = None,
        disk: DiskTier | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str = "",
        response_categories: Mapping[str, ResponseCategory] = NO_CATEGORIES,
        step_lock: AbstractContextManager[object] = nullcontext(),  # noqa: B008, without state
    ) -> None:
        persistence = persistence or SessionPersistence()
        self.responses = ResponseCache(response_categories, engine.runtime, options.clock)
        core = EngineCore(engine, options, persistence, disk or DiskTier(), self._wake)
        if tool_parser is None:
            tool_parser = default_tool_parser(engine.tokenizer.tokenizer.chat_template)
        form = AnswerForm(tool_parser, reasoning_parser)
        self._prefetching = ThreadPoolExecutor(1, "larder workflows")
        self._absent = set[tuple[str, str]]()  # stored sessions that it is to load
        self.context = EngineContext(core, persistence, self.responses, form, step_lock)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        context, core = self.context, self.context.core
        try:
            if request.cached_response is not None:
                core.scheduler.queue.check(request.tenant)  # before the question is embedded
                taken = self.responses.take(request, listener)
                if taken is None:
                    return Ticket()
                request, listener = taken
            if request.has_contexts:  # sessions are found by messages, which contexts become
                request = context.call(partial(core.prepared, request))
            if request.constraint is not None:  # compiled here, so that the model's thread need not
                core.constraints.matcher(request.constraint)
            take = partial(self._submit_now, request, listener, core.clock())
            serving = core.serving_of(request)
            ticket, absent = context.candidates.resolve_resident(request, serving, take)
        except ApiError as error:
            core.refused.count(error.code)
            raise
        for name in absent:
            self._prefetch_later(request.tenant, name, request.steps[name])
        return ticket

    def arrival(self) -> Arrival:
        return self.context.thread.announce()

    def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return operation.run(self.context, *args, **kwargs)

    def close(self) -> None:
        self._prefetching.shutdown(wait=False, cancel_futures=True)
        self.context.thread.close()
        self._prefetching.shutdown()

    def limit(self, tier: Tier, count: int) -> int:
        """Set a tier's budget while serving; the bytes above it, freed once their answers are
        complete."""
        return self.context.call(lambda: self.context.core.tiers.lower(tier, count))

    def _submit_now(
        self, request: Request, listener: Listener, arrived: float
    ) -> tuple[Ticket, tuple[str, ...]]:
        """Queue a request; its handle, and the sessions that a workflow uses next and that are not
        in memory."""
        core = self.context.core
        ticket = core.submit(request, listener, arrived)
        return ticket, core.announce(request.tenant, request.steps)

    def _prefetch_later(self, tenant: str, name: str, steps: int) -> None:
        """Load a stored session in the background, unless many are to be loaded already."""
        if len(self._absent) >= MAX_DUE or (tenant, name) in self._absent:
            return
        self._absent.add((tenant, name))
        try:
            self._prefetching.submit(self._prefetch, tenant, name, steps)
        except RuntimeError:  # the server stops
            self._absent.discard((tenant, name))

    def _prefetch(self, tenant: str, name: str, steps: int) -> None:
        """Load a stored session that a workflow uses next; one that cannot be loaded is left to its
        request."""
        context = self.context
        try:
            with suppress(LarderError), context.prefetched(tenant, name):
                context.call(lambda: context.core.announce(tenant, {name: steps}))
        finally:
            self._absent.discard((tenant, name))

    def _wake(self) -> None:
        self.context.thread.wake()
