"""Conversations over one model, for one thread: what happens between two steps, and the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic

from larder.core.errors import BudgetError, LarderError
from larder.engine.detokenizer import IncrementalDetokenizer
from larder.engine.engine import Engine
from larder.server.admin_operations import AdminOperations
from larder.server.admission import turn_demand
from larder.server.api_errors import (
    context_length_exceeded,
    invalid_request,
    kv_budget_exceeded,
    text_too_long,
)
from larder.server.model_runner import ModelRunner
from larder.server.model_thread import CompletionQueue
from larder.server.persistence.base import SessionPersistence, StoredSession
from larder.server.persistence.restore import (
    CandidateLoader,
    Lookup,
    ResidencyLocks,
    SessionRestorer,
)
from larder.server.persistence.retry_queue import WriteRetryQueue
from larder.server.persistence.session_file import TOKEN_CHARACTERS, TranscriptSnapshot
from larder.server.request import (
    ChatMessage,
    Listener,
    Report,
    Request,
    SessionUnreadableError,
    Ticket,
)
from larder.server.request_queue import RequestQueue
from larder.server.request_state import RequestState, RequestTimes
from larder.server.scheduler import Scheduler
from larder.server.serving_policy import ServingPolicy
from larder.server.session_backend.base import SessionBackend
from larder.server.session_backend.chat import ChatBackend
from larder.server.session_backend.prefix import PrefixBackend
from larder.server.session_index import ResolvedSession, SessionIndex
from larder.server.session_info import session_info
from larder.server.session_state import CompletedTurn, SessionState
from larder.server.stats import ReasonCounter
from larder.server.tiers.device import DeviceReservations
from larder.server.tiers.disk import DiskTier
from larder.server.tiers.manager import TierManager, can_unload
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.store.eviction.base import EVICTIONS
from larder.store.ledger import ByteBudgets, ByteLedger, Tier

CLOSING_SECONDS = 30.0
MAX_REFRESHES = 4  # times that a request looks again where others are quicker


class EngineCore:
    """A hub without a thread: whoever uses it calls `step` until it has nothing to do.

    Args:
        engine, budgets, eviction, rows, waiting, keeper, vault, clock: as `LocalHub` takes them.
        wake: told that a step would have something to do.
        lookup: finds sessions that are not in memory; None for where the keeper keeps them.

    Raises:
        UsageError: the policy is not one that a server can follow.
    """

    def __init__(
        self,
        engine: Engine,
        budgets: ByteBudgets,
        eviction: str,
        rows: int,
        waiting: int,
        keeper: SessionPersistence,
        vault: DiskTier,
        clock: Callable[[], float],
        wake: Callable[[], None],
        lookup: Lookup | None = None,
    ) -> None:
        self.engine, self.clock, self._wake = engine, clock, wake
        self.rule = ServingPolicy.of(engine)
        self._exact = self.rule.exact() if self.rule.is_limited or self.rule.is_chat else self.rule
        self.ledger = ByteLedger(budgets)
        self.purse = DeviceReservations(self.ledger)
        self.sessions, self.awaited = SessionIndex(engine.tokenizer, clock), ResidencyLocks()
        news = self.news = CompletionQueue(wake)
        rule, unload = EVICTIONS.load(eviction)(), self._unload
        self.tiers = TierManager(self.ledger, self.purse, rule, clock, vault, news, unload)
        decoder = engine.loaded.decoder
        self._manners: tuple[SessionBackend, SessionBackend] = (
            PrefixBackend(self.tiers, self.purse, engine.tokenizer, self.sessions.sharing),
            ChatBackend(self.tiers, self.purse, engine.tokenizer),
        )
        directory = self._directory = IndexedSessionPersistence(self.sessions, self.forget, keeper)
        told = decoder, engine.tokenizer, engine.stop_ids
        self.unwritten = WriteRetryQueue(keeper, news, vault.durability, clock, wake)
        own = ModelRunner(*told), self.tiers, directory, news, self.unwritten, clock
        self.scheduler = Scheduler(*own, RequestQueue(waiting), rows)
        self._moving = AdminOperations(self.tiers, news, lambda: len(self.scheduler.queue))
        rules = (self.rule,) if self._exact is self.rule else (self.rule, self._exact)
        self._keeper, self._looks, own = keeper, lookup is None, (rules, self._charged)
        self.recalling = SessionRestorer(decoder, self.sessions, lookup or keeper.recall, *own)
        self._refreshing = SessionRestorer(decoder, self.sessions, keeper.recall, *own)
        own = self.sessions, keeper, self.awaited, lambda act: act(), self._recall
        self._gathering = CandidateLoader(*own, self.recalling)
        self.refused = ReasonCounter()

    @property
    def context(self) -> int:
        """Tokens that the model was made for."""
        config = self.engine.loaded.decoder.module.config.get_text_config()
        return int(config.max_position_embeddings)

    def step(self) -> bool:
        """As `Scheduler.step`; where a budget was lowered under answers, sessions leave then."""
        self.unwritten.retry()
        goes_on = self.scheduler.step()
        for tier in (Tier.DEVICE, Tier.HOST):
            if self.ledger.used(tier) > self.ledger.limit(tier):
                self.tiers.lower(tier, self.ledger.limit(tier))
        return goes_on

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Serve nobody any more, and keep what is not kept yet.

        Args:
            seconds: for which caches are saved, those first that were used last.
        """
        self.scheduler.cancel_all()
        self.unwritten.close()
        self.news.drain()
        until = monotonic() + seconds
        for sitting in sorted(self.sessions, key=lambda each: -each.last_used):
            if monotonic() < until:
                self.tiers.save(sitting)
                self.news.drain()
        self._directory.close()
        self.tiers.vault.close()

    def submit(self, request: Request, listener: Listener, asked: float) -> Ticket:
        """As `Hub.submit`.

        Args:
            asked: when the request came.
        """
        self.scheduler.queue.check(request.tenant)
        if request.max_new_tokens < 1:
            raise invalid_request(
                f"At least 1 new token must be asked for, got {request.max_new_tokens}.",
                "max_tokens",
            )
        found = self._resolved(request)
        if found.again is not None:
            told = self.engine.tokenizer, found.sitting, found.again, listener
            return replay_answer(*told, self.clock() - asked, self.unwritten.durable(found.sitting))
        try:
            job = self._job(request, found, listener, asked)
            self._directory.claim(found.sitting)
        except BaseException:
            if found.sitting.is_provisional:
                self.forget(found.sitting)
            raise
        self.scheduler.enqueue(job)
        self._wake()
        return job

    def check_length(self, *texts: str, param: str = "messages") -> None:
        """Raises: Refusal: texts are longer than any that the model could read."""
        count, limit = sum(map(len, texts)), self.context * TOKEN_CHARACTERS
        if count > limit:
            raise text_too_long(count, limit, param)

    def open(self, tenant: str, name: str, turns: Sequence[ChatMessage]) -> SessionState:
        """As `Hub.open`."""
        self._recall(tenant, name)
        sitting = self.sessions.open(tenant, name, self.rule)
        sitting.opening = tuple(turns)
        return self._charged(sitting)

    def fork(self, tenant: str, name: str, new_name: str | None) -> SessionState:
        """As `Hub.fork`."""
        self._recall(tenant, new_name)
        source = self.idle(tenant, name)
        made = self.sessions.fork(source, new_name, source.rule, len(source.said))
        made.epoch = source.epoch
        if made.said:
            self.sessions.remember(made)
        return self._kept(self._charged(made))

    def compact(self, tenant: str, name: str) -> Future[SessionState]:
        """As `Hub.compact`; done once it is."""
        return self._moving.compact(self.idle(tenant, name))

    def release(self, tenant: str, name: str) -> Future[SessionState]:
        """As `Hub.release`; done once it has left."""
        return self._moving.release(self.idle(tenant, name))

    def prefetch(self, tenant: str, name: str) -> Future[SessionState]:
        """As `Hub.prefetch`; done once it is there."""
        return self._moving.prefetch(self.idle(tenant, name))

    def import_(self, tenant: str, name: str, told: TranscriptSnapshot) -> SessionState:
        """As `Hub.import_`, of what `Recalling.read` has read."""
        self._recall(tenant, name)
        return self._kept(self._charged(self.recalling.imported(tenant, name, told)))

    def find(self, tenant: str, name: str) -> SessionState:
        """A session, from where it is kept if need be.

        Raises:
            Refusal: there is none.
        """
        self._recall(tenant, name)
        self._is_refreshed(self.sessions.find(tenant, name))
        return self.sessions.find(tenant, name)

    def idle(self, tenant: str, name: str) -> SessionState:
        """The same, if it is not answering.

        Raises:
            Refusal: there is none, or it is.
        """
        self.find(tenant, name)
        return self.sessions.idle(tenant, name)

    def remove(self, tenant: str, *names: str) -> list[Future[None]]:
        """Forget sessions, or none where one is answering; what is done once they are gone."""
        leaving = [self.idle(tenant, name) for name in names]
        told = [self._directory.remove(each) for each in leaving]
        return [each for each in told if each is not None]

    def forget(self, sitting: SessionState) -> None:
        """A session is no more."""
        self.unwritten.forget(sitting)
        self.tiers.forget(sitting)
        self.sessions.forget(sitting)

    def _resolved(self, request: Request) -> ResolvedSession:
        """Where a request goes on, as far as anybody has come with it."""
        rule = self.rule_of(request)
        self.check_length(request.raw_prompt or "", *(turn.text for turn in request.turns))
        resolve = partial(self._resolve, request, rule)
        return (
            self._gathering.resolve_resident(request, rule, resolve) if self._looks else resolve()
        )

    def _resolve(self, request: Request, rule: ServingPolicy) -> ResolvedSession:
        found = self.sessions.resolve(request, rule)
        for _ in range(MAX_REFRESHES):
            try:
                if not self._is_refreshed(found.sitting):
                    break
            except SessionUnreadableError as error:
                self.recalling.restart_from_request(error, request)
            found = self.sessions.resolve(request, rule)
        return found

    def rule_of(self, request: Request) -> ServingPolicy:
        """What a request is to be answered by."""
        return self._exact if request.exact else self.rule

    def _is_refreshed(self, sitting: SessionState) -> bool:
        """Whether somebody else has gone on with a session, which is had anew then."""
        if sitting.is_answering or not self._directory.is_behind(sitting):
            return False
        self.forget(sitting)
        self._refreshing.recall(sitting.tenant, sitting.name)
        return True

    def _recall(self, tenant: str, *names: str | None) -> None:
        self.recalling.recall(tenant, *names)

    def _kept(self, sitting: SessionState) -> SessionState:
        """Have what was made of another session outlive the process, too."""
        future = self._keeper.commit(sitting, sitting.said[-1]) if sitting.said else None
        self.news.track_write(sitting, future, partial(self.unwritten.note, sitting))
        return sitting

    def _unload(self, sitting: SessionState) -> bool:
        """Have a session leave memory with its forks, if that may be; whether it has."""
        family = self.sessions.family(sitting)
        if self.awaited.has(sitting) or not can_unload(sitting, family):
            return False
        for each in family:
            self.forget(each)
        return True

    def _job(
        self, request: Request, found: ResolvedSession, listener: Listener, asked: float
    ) -> RequestState:
        length = len(found.wanted)
        if length >= self.context:
            raise context_length_exceeded(length, self.context)
        new_tokens = min(request.max_new_tokens, self.context - length)
        need = turn_demand(found.sitting.rule, found.said, length, new_tokens)
        if not self.purse.fits(request.tenant, need):
            raise kv_budget_exceeded(
                BudgetError(
                    f"The conversation may come to {need.total} bytes of keys and values, more "
                    "than may be held: shorten it, ask for fewer new tokens, or raise the budget."
                )
            )
        told = request, listener, found.sitting, found.said, found.turns, found.wanted, new_tokens
        manner = self._manners[found.sitting.rule.is_chat]
        return RequestState(*told, RequestTimes(asked), self._wake, manner)

    def _charged(self, sitting: SessionState) -> SessionState:
        if not self.tiers.weigh(sitting):
            self.forget(sitting)
            raise kv_budget_exceeded(
                BudgetError("There is no room for another session: remove some.")
            )
        return sitting


class CompletedTicket(Ticket):
    """Of an answer that was there already."""

    def cancel(self) -> None:
        """Nothing is left to cancel."""


def replay_answer(
    scribe: TokenizerAdapter,
    sitting: SessionState,
    said: CompletedTurn,
    listener: Listener,
    seconds: float,
    durable: bool | None,
) -> Ticket:
    """Tell an answer that was given before, from its tokens: the text that is kept of it lacks the
    white space around it.

    Args:
        seconds: since it was asked for once more.
        durable: as in `Report`.
    """
    ids = said.answer[: max(0, len(said.answer) - len(scribe.end_of_turn_ids()))]
    stream = IncrementalDetokenizer(scribe.decode, said.asked.stop, listener.on_text)
    all(stream.push(token) for token in ids)
    stream.finish()
    prompt, view = sitting.tokens - len(said.answer), session_info(sitting)
    counts = prompt, prompt, 0, 0, len(ids), view.evicted_tokens, view.merged_tokens
    told = sitting.name, *counts, sitting.is_lossless, sitting.tier, said.reason
    listener.on_done(Report(*told, 0.0, seconds, seconds, durable))
    return CompletedTicket()


class IndexedSessionPersistence(SessionPersistence):
    """Keeps the index of sessions, and hands turns on to whoever keeps them for good."""

    def __init__(
        self,
        sessions: SessionIndex,
        forget: Callable[[SessionState], None],
        keeper: SessionPersistence,
    ) -> None:
        self._sessions, self._forget, self._keeper = sessions, forget, keeper

    def commit(
        self, sitting: SessionState, said: CompletedTurn
    ) -> Future[LarderError | None] | None:
        if len(sitting.said) == 1 or sitting.epoch == 1:
            self._sessions.remember(sitting)
        return self._keeper.commit(sitting, said)

    def discard_new(self, sitting: SessionState) -> None:
        self._forget(sitting)
        self._keeper.discard_new(sitting)

    def recall(self, tenant: str, name: str) -> StoredSession | None:
        return self._keeper.recall(tenant, name)

    def remove(self, sitting: SessionState) -> Future[None] | None:
        future = self._keeper.remove(sitting)
        self._forget(sitting)
        return future

    def names(self, tenant: str, turns: Sequence[ChatMessage]) -> Sequence[str]:
        return self._keeper.names(tenant, turns)

    def merge(self, tenant: str, name: str) -> None:
        self._keeper.merge(tenant, name)

    def is_behind(self, sitting: SessionState) -> bool:
        return self._keeper.is_behind(sitting)

    def claim(self, sitting: SessionState) -> None:
        self._keeper.claim(sitting)

    def rest(self, sitting: SessionState) -> None:
        self._keeper.rest(sitting)

    def close(self) -> None:
        self._keeper.close()
