"""Engine core: sessions and requests over one model, driven step by step by one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from time import monotonic
from weakref import WeakValueDictionary

from larder.core.errors import BudgetError, UsageError
from larder.engine.engine import Engine
from larder.server.admin_operations import AdminOperations
from larder.server.admission import check_demand
from larder.server.answer_text import replay_answer
from larder.server.api_errors import (
    context_length_exceeded,
    invalid_request,
    kv_budget_exceeded,
    text_too_long,
)
from larder.server.context_prompts import ContextPrompts, all_contexts, with_message_contexts
from larder.server.engine_options import EngineOptions
from larder.server.host_chunks import HostChunks
from larder.server.image_prompts import ImagePromptEncoder
from larder.server.model_runner import ModelRunner
from larder.server.model_thread import CompletionQueue
from larder.server.persistence.base import SessionPersistence
from larder.server.persistence.restore import ResidencyLocks, SessionRestorer
from larder.server.persistence.retry_queue import WriteRetryQueue
from larder.server.persistence.session_file import TOKEN_CHARACTERS, TranscriptSnapshot
from larder.server.request import ChatMessage, Listener, Request, SessionUnreadableError, Ticket
from larder.server.request_finisher import RequestFinisher
from larder.server.request_queue import Programs, RequestQueue
from larder.server.request_state import RequestState, RequestTimes
from larder.server.scheduler import Scheduler
from larder.server.serving_policy import ServingPolicy
from larder.server.session_backend.base import SessionBackend
from larder.server.session_backend.chat import ChatBackend
from larder.server.session_backend.prefix import PrefixBackend
from larder.server.session_index import ResolvedSession, SessionIndex
from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.disk import DiskTier
from larder.server.tiers.eviction_order import prefill_operations
from larder.server.tiers.manager import TierManager, can_unload
from larder.server.tiers.prefetch import CachePrefetcher
from larder.server.token_budget import PrefillTokenBudget
from larder.store.eviction.base import EVICTIONS
from larder.store.failures import ReasonCounter
from larder.store.ledger import ByteLedger, Tier

CLOSING_SECONDS = 30.0
MAX_PREFETCHED, MAX_DUE = 8, 64  # sessions of one request that are prefetched, and of all
MAX_REFRESHES = 4  # times that a session is reloaded if other servers keep writing it


class EngineCore:
    """Scheduler, session index, memory tiers and persistence of one engine, without a thread.

    The caller invokes `step` until it returns False. `context` is the longest text with its answer,
    in tokens.

    Args:
        options: memory, scheduling and names of the model.
        persistence: stores finished turns.
        disk: stores caches that are not in use.
        wake: called, from any thread, when a step would have work to do.

    Raises:
        UsageError: the policy cannot be served, or the model does not read `max_model_len` tokens.
        BadParameter: `inter_token_seconds` is out of range.
    """

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions,
        persistence: SessionPersistence,
        disk: DiskTier,
        wake: Callable[[], None],
    ) -> None:
        clock = options.clock
        self.engine, self.clock, self._wake = engine, clock, wake
        self.names = tuple(options.names) or (engine.loaded.name,)
        self.constraints = engine.constraints
        self.context = _context_tokens(engine, options.max_model_len)
        self.serving = ServingPolicy.of(engine)
        self._exact = self._exact_policy()
        self.ledger = ByteLedger(options.budgets)
        self.reservations = DeviceReservations(self.ledger)
        self.images = ImagePromptEncoder(engine.processor, engine.loaded.decoder, engine.tokenizer)
        self.sessions = SessionIndex(engine.tokenizer, self.images, clock)
        self.residency_locks = ResidencyLocks()
        completions = self.completions = CompletionQueue(wake)
        self.tiers = self._new_tiers(options.eviction, disk)
        self.token_budget = PrefillTokenBudget(options.inter_token_seconds)
        self._chat = ChatBackend(self.tiers, self.reservations, engine.tokenizer, self.token_budget)
        self.contexts = self._new_contexts()
        self._prefix = PrefixBackend(
            self.tiers,
            self.reservations,
            self.images,
            self.sessions.find_shared_prefix,
            self.contexts,
            self.token_budget,
            options.prefill_chunk,
        )
        self._persistence = persistence
        self.unwritten = WriteRetryQueue(persistence, completions, disk.durability, clock, wake)
        self.scheduler = self._new_scheduler(options)
        self.prefetcher = CachePrefetcher(self.tiers, completions, self._idle_demand)
        self._due = deque[tuple[str, str]](maxlen=MAX_DUE)
        self.admin = AdminOperations(self.tiers, completions, self._backend_of)
        self.restorer = self._new_restorer()
        self.refused = ReasonCounter()
        # First answers to prompts that get several, by tenant and group, while they are in use.
        self._first_choices = WeakValueDictionary[tuple[str, str], RequestState]()

    def step(self) -> bool:
        """Run `Scheduler.step`, then evict sessions if a budget was lowered while they were
        answering, and fetch one that a workflow uses next if no request waits for memory. Caches of
        idle sessions that have grown too large are rebuilt while there is nothing else to do."""
        self.unwritten.retry()
        goes_on = self.scheduler.step() or self._chat.refresher.step()
        if self._due and not len(self.scheduler.queue):
            tenant, name = self._due.popleft()
            if self.sessions.has(tenant, name):
                self.prefetcher.prefetch(self.sessions.find(tenant, name))
            goes_on = True
        for tier in (Tier.DEVICE, Tier.HOST):
            if self.ledger.used(tier) > self.ledger.limit(tier):
                self.tiers.lower(tier, self.ledger.limit(tier))
        return goes_on

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Cancel all requests, and save caches that the store does not have.

        Args:
            seconds: time limit for saving, turns first, then caches of the most recently used
                sessions. What the store has not answered by then is given up.
        """
        until = monotonic() + seconds
        self.scheduler.cancel_all()
        self.unwritten.close()
        self.completions.drain(until)
        for session in sorted(self.sessions, key=lambda each: -each.usage.last_used):
            if monotonic() < until:
                self.tiers.save(session)
                self.completions.drain(until)
        if self.completions.in_flight:
            self.tiers.disk.stop()
            self.completions.drain()
        self._persistence.close()
        self.tiers.disk.close()

    def submit(self, request: Request, listener: Listener, arrived: float) -> Ticket:
        """Queue a request, as `EngineClient.submit`.

        Args:
            arrived: arrival time of the request.
        """
        request = self.prepared(request)
        resolved = self._resolved_ephemeral(request) if request.is_ephemeral else None
        resolved = resolved or self._resolved(request)
        if resolved.repeated_turn is not None:
            return replay_answer(
                self.engine.tokenizer,
                resolved.session,
                resolved.repeated_turn,
                listener,
                seconds=self.clock() - arrived,
                durable=self.unwritten.durable(resolved.session),
            )
        try:
            state = self._request_state(request, resolved, listener, arrived)
            self._persistence.locks.acquire(resolved.session)
        except BaseException:
            if resolved.session.usage.is_provisional:
                self.forget(resolved.session)
            raise
        self.scheduler.enqueue(state)
        if request.choice_group and not request.choice:
            self._first_choices[request.tenant, request.choice_group] = state
        self._wake()
        return state

    def prepared(self, request: Request) -> Request:
        """Request that is checked and has its contexts in its messages; under a policy that reads
        contexts apart, those of the first message of the user are left.

        Sessions are found by the messages of a prepared request.

        Raises:
            ApiError: the queue is full, or a field is out of range; 404 `context_not_found`.
        """
        self.scheduler.queue.check(request.tenant)
        if request.max_new_tokens < 1:
            raise invalid_request(
                f"max_tokens must be at least 1, got {request.max_new_tokens}.", "max_tokens"
            )
        vocabulary = self.engine.loaded.decoder.vocab_size
        if (token := max(request.sampling.logit_bias, default=0)) >= vocabulary:
            raise invalid_request(
                f"logit_bias has the token id {token}, but the model has {vocabulary} tokens: take "
                "ids of its own tokenizer.",
                "logit_bias",
            )
        if not request.has_contexts:
            return request
        request = self.contexts.resolved(request)
        self.check_length(*all_contexts(request), param="contexts")
        self.contexts.keep(request)
        request = with_message_contexts(request)
        is_apart = self.serving_of(request).policy.schedule.cache_form or not request.contexts
        return request if is_apart else self.contexts.as_message(request)

    def announce(self, tenant: str, steps: Mapping[str, int]) -> tuple[str, ...]:
        """Note in how many workflow steps sessions are used again, and fetch those of the next
        step, if the eviction policy does so; those of them that are not in memory."""
        self.sessions.set_workflow_steps(tenant, steps)
        if not self.tiers.prefetches:
            return ()
        due = [name for name, count in steps.items() if name and count <= 1][:MAX_PREFETCHED]
        self._due.extend((tenant, name) for name in due)
        return tuple(name for name in due if not self.sessions.has(tenant, name))

    def check_length(self, *texts: str, param: str = "messages") -> None:
        """Raise if texts are longer than the model could read.

        Raises:
            ApiError: 400 `context_length_exceeded`.
        """
        count, limit = sum(map(len, texts)), self.context * TOKEN_CHARACTERS
        if count > limit:
            raise text_too_long(count, limit, param)

    def open(self, tenant: str, name: str, turns: Sequence[ChatMessage]) -> SessionState:
        """Create a session, as `EngineClient.open`."""
        session = self.sessions.open(tenant, name, self.serving)
        session.transcript.opening_messages = tuple(turns)
        return self._charged(session)

    def fork(self, tenant: str, name: str, new_name: str | None) -> SessionState:
        """Copy a session, as `EngineClient.fork`."""
        source = self.idle(tenant, name)
        forked = self.sessions.fork(source, new_name, source.serving, len(source.turns))
        forked.transcript.epoch = source.transcript.epoch
        if forked.turns:
            self.sessions.index_session(forked)
        return self._persisted(self._charged(forked))

    def import_(self, tenant: str, name: str, transcript: TranscriptSnapshot) -> SessionState:
        """Create a session from a transcript that `SessionRestorer.decode` has returned."""
        return self._persisted(self._charged(self.restorer.create(tenant, name, transcript)))

    def find(self, tenant: str, name: str) -> SessionState:
        """A session in memory, at its newest state.

        Raises:
            ApiError: 404 `session_not_found`.
        """
        self._reloaded(self.sessions.find(tenant, name))
        return self.sessions.find(tenant, name)

    def idle(self, tenant: str, name: str) -> SessionState:
        """A session that is not answering.

        Raises:
            ApiError: 404 `session_not_found`, or 409 `session_busy`.
        """
        self.find(tenant, name)
        return self.sessions.idle(tenant, name)

    def remove(self, tenant: str, *names: str) -> list[Future[None]]:
        """Delete sessions, or none if one is answering; the futures of their
        deletion in the store."""
        idle_sessions = [self.idle(tenant, name) for name in names]
        removals = [self._persistence.remove(each) for each in idle_sessions]
        for each in idle_sessions:
            self.forget(each)
        return [each for each in removals if each is not None]

    def forget(self, session: SessionState) -> None:
        """Drop all that memory has of a session."""
        self.unwritten.forget(session)
        self.tiers.forget(session)
        self.sessions.forget(session)

    def _resolved(self, request: Request) -> ResolvedSession:
        """The session that a request continues, at its newest state."""
        serving = self.serving_of(request)
        self.check_length(request.raw_prompt or "", *(turn.text for turn in request.turns))
        resolved = self.sessions.resolve(request, serving)
        for _ in range(MAX_REFRESHES):
            try:
                if not self._reloaded(resolved.session):
                    break
            except SessionUnreadableError as error:
                self.restorer.restart_from_request(error, request)
            resolved = self.sessions.resolve(request, serving)
        return resolved

    def _resolved_ephemeral(self, request: Request) -> ResolvedSession:
        """A session for one answer, beside that of the first answer to the same prompt."""
        self.check_length(request.raw_prompt or "", *(turn.text for turn in request.turns))
        if request.contexts:
            ids = self.contexts.prompt(request).ids
            request = replace(request, raw_prompt=request.turns[-1].text, raw_ids=ids)
            return self.sessions.resolve_ephemeral(request, self.serving_of(request), None)
        first = self._first_choices.get((request.tenant, request.choice_group))
        leader = None if first is None or request.prompt_logprobs else first.resolved
        return self.sessions.resolve_ephemeral(request, self.serving_of(request), leader)

    def serving_of(self, request: Request) -> ServingPolicy:
        """The policy that a request is answered under."""
        return self._exact if request.exact or request.prompt_logprobs else self.serving

    def _backend_of(self, serving: ServingPolicy) -> SessionBackend:
        """Backend of the sessions under a policy."""
        return self._chat if serving.is_chat else self._prefix

    def _exact_policy(self) -> ServingPolicy:
        """Policy of exact requests: the server's own where that is lossless."""
        is_exact = not (self.serving.is_chat or self.serving.policy.schedule.cache_form)
        return self.serving if is_exact else self.serving.exact()

    def _new_tiers(self, eviction: str, disk: DiskTier) -> TierManager:
        """Memory tiers under the eviction policy of a name."""
        eviction_policy, operations = EVICTIONS.load(eviction)(), _operations(self.engine)
        return TierManager(
            self.ledger,
            self.reservations,
            eviction_policy,
            self.clock,
            disk,
            self.completions,
            self._unload,
            operations,
        )

    def _new_contexts(self) -> ContextPrompts:
        """Contexts of requests, with their chunks in host memory."""
        eviction_policy = EVICTIONS.load(self.serving.policy.schedule.chunk_eviction)()
        chunks = HostChunks(self.ledger, eviction_policy, _operations(self.engine))
        return ContextPrompts(self.engine.tokenizer, self.ledger, chunks)

    def _new_scheduler(self, options: EngineOptions) -> Scheduler:
        """Scheduler over the parts of this engine core."""
        engine, programs = self.engine, Programs()
        runner = ModelRunner(engine.loaded.decoder, engine.tokenizer, engine.stop_ids)
        finisher = RequestFinisher(
            runner,
            self.tiers,
            self.sessions,
            self.forget,
            self._persistence,
            self.completions,
            self.unwritten,
            self.clock,
            programs,
        )
        return Scheduler(
            runner,
            self.tiers,
            self.completions,
            self.clock,
            RequestQueue(options.waiting, options.scheduling),
            finisher,
            programs,
            options.rows,
            token_budget=self.token_budget,
        )

    def _new_restorer(self) -> SessionRestorer:
        """Restorer of sessions under the policies of this engine core."""
        policies = (self.serving,) if self._exact is self.serving else (self.serving, self._exact)
        decoder = self.engine.loaded.decoder
        return SessionRestorer(decoder, self.sessions, self._persistence, policies, self._charged)

    def _idle_demand(self, session: SessionState) -> MemoryDemand:
        """Upper bound of the device memory of an idle session."""
        return self._backend_of(session.serving).idle_demand(session)

    def _reloaded(self, session: SessionState) -> bool:
        """Reload a session if another server has written it since; true if it was reloaded."""
        if session.usage.is_answering or not self._persistence.locks.is_outdated(session):
            return False
        self.forget(session)
        self.restorer.restore(session.tenant, session.name)
        return True

    def _persisted(self, session: SessionState) -> SessionState:
        """Write a session that was copied or imported to the store."""
        future = self._persistence.commit(session, session.turns[-1]) if session.turns else None
        self.completions.track_write(session, future, partial(self.unwritten.note, session))
        return session

    def _unload(self, session: SessionState) -> bool:
        """Remove a session and its forks from memory, if allowed; true if they were removed."""
        family = self.sessions.family(session)
        if self.residency_locks.is_held(session) or not can_unload(session, family):
            return False
        for each in family:
            self.forget(each)
        return True

    def _request_state(
        self, request: Request, resolved: ResolvedSession, listener: Listener, arrived: float
    ) -> RequestState:
        length = len(resolved.prompt_ids)
        if length >= self.context:
            raise context_length_exceeded(length, self.context)
        new_tokens = min(request.max_new_tokens, self.context - length)
        serving = resolved.session.serving
        self.images.check_policy(resolved.prompt_ids, serving)
        backend = self._backend_of(serving)
        demand = backend.turn_demand(serving, resolved.past_turns, length, new_tokens)
        check_demand(request.tenant, demand, self.reservations)
        return RequestState(
            request=request,
            listener=listener,
            resolved=resolved,
            new_tokens=new_tokens,
            times=RequestTimes(arrived),
            wake=self._wake,
            backend=backend,
            matcher=request.constraint and self.constraints.matcher(request.constraint),
            contexts=self.contexts.prompt(request) if request.contexts else None,
        )

    def _charged(self, session: SessionState) -> SessionState:
        if not self.tiers.charge_transcript(session):
            self.forget(session)
            raise kv_budget_exceeded(
                BudgetError("Host memory has no room for another session: remove some.")
            )
        return session


def _operations(engine: Engine) -> Callable[[int], float]:
    """Number of operations for reading a text, by its number of tokens."""
    decoder = engine.loaded.decoder
    num_weights = sum(each.numel() for each in decoder.module.parameters())
    return partial(prefill_operations, decoder.spec, num_weights)


def _context_tokens(engine: Engine, max_model_len: int | None) -> int:
    """Longest text with its answer, in tokens.

    Raises:
        UsageError: it is longer than the model reads.
    """
    config = engine.loaded.decoder.module.config.get_text_config()
    context = int(config.max_position_embeddings)
    if max_model_len is not None and max_model_len > context:
        raise UsageError(
            f"max_model_len {max_model_len} is more than the {context} tokens that the model "
            "reads: give fewer, or leave it out."
        )
    return context if max_model_len is None else max_model_len
