"""Engine client over an engine core in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import ParamSpec, TypeVar

from larder.core.errors import LarderError
from larder.engine.engine import Engine
from larder.server.answer_form import AnswerForm, default_tool_parser
from larder.server.engine_client import EngineClient
from larder.server.engine_context import EngineContext
from larder.server.engine_core import MAX_DUE, EngineCore
from larder.server.operation import Operation
from larder.server.persistence.base import SessionPersistence
from larder.server.request import ApiError, Listener, Request, Ticket
from larder.server.request_queue import SchedulingPolicy
from larder.server.response_cache import NO_CATEGORIES, ResponseCache, ResponseCategory
from larder.server.tiers.disk import DiskTier
from larder.store.ledger import ByteBudgets, Tier

P = ParamSpec("P")
R = TypeVar("R")


class LocalEngineClient(EngineClient):
    """Serves an engine's model under its policy. Safe from any thread.

    The engine must not be used by others meanwhile.

    Args:
        budgets: capacity of device and host memory for caches, in bytes.
        eviction: name of the eviction policy of a full tier.
        rows: maximum number of sequences in one decode step.
        waiting: maximum number of queued requests.
        persistence: stores finished turns.
        disk: stores caches that are not in use.
        clock: seconds since 1970.
        names: names of the model in requests, the first that of answers; none for its own.
        max_model_len: longest text with its answer, in tokens; None for what the model reads.
        tool_parser: parser of tool calls; empty for none, None for that of the chat template.
        reasoning_parser: parser of the reasoning; empty for none.
        prefill_chunk: most tokens of a prompt that are read between two tokens of other answers,
            for policies without eviction; None for a block.
        scheduling: order of the requests of one tenant.
        inter_token_seconds: wanted between two tokens of an answer while prompts are read, by which
            chunks of prompts are sized under policies without eviction; None for no such target.
        response_categories: categories of the response cache by name; none for no such cache.
        step_lock: held during a step, by several models that take turns.

    Raises:
        UsageError: the policy cannot be served, or the model does not read `max_model_len` tokens.
        BadParameter: `prefill_chunk` or `inter_token_seconds` is out of range.
        UnknownName, DependencyError, ModelError: an embedder of a category cannot be loaded.
    """

    def __init__(
        self,
        engine: Engine,
        budgets: ByteBudgets = ByteBudgets(),  # noqa: B008, frozen
        *,
        eviction: str = "lru",
        rows: int = 64,
        waiting: int = 1024,
        persistence: SessionPersistence | None = None,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.time,
        names: Sequence[str] = (),
        max_model_len: int | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str = "",
        prefill_chunk: int | None = None,
        scheduling: SchedulingPolicy = SchedulingPolicy.PRIORITY,
        inter_token_seconds: float | None = None,
        response_categories: Mapping[str, ResponseCategory] = NO_CATEGORIES,
        step_lock: AbstractContextManager[object] = nullcontext(),  # noqa: B008, without state
    ) -> None:
        persistence = persistence or SessionPersistence()
        self.responses = ResponseCache(response_categories, engine.runtime, clock)
        core = EngineCore(
            engine,
            budgets,
            eviction,
            rows,
            waiting,
            persistence,
            disk or DiskTier(),
            clock,
            self._wake,
            names,
            max_model_len,
            prefill_chunk,
            scheduling,
            inter_token_seconds,
        )
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
