"""Many conversations over one model in this process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from larder.core.errors import BudgetError, InputError
from larder.engine.engine import Engine
from larder.server import archive
from larder.server.answering import Answering
from larder.server.budget import Purse
from larder.server.counting import counted
from larder.server.hub import Hub, Kept, Served, SessionTurns, SessionView, Stats
from larder.server.job import Job, Times
from larder.server.model_thread import ModelThread
from larder.server.refusals import closed, invalid, overloaded, too_long, too_much
from larder.server.request import Listener, Refusal, Report, Request, Ticket, Turn
from larder.server.rule import Held, Rule
from larder.server.scheduler import Keeper, Scheduler
from larder.server.sessions import Resolved, Sessions
from larder.server.sitting import Said, Sitting
from larder.server.starting import Starting
from larder.server.tiers import Tiers
from larder.server.views import kept_of, turns_of, view_of
from larder.store.eviction.base import EVICTIONS
from larder.store.ledger import Budgets, ByteLedger, Tier


class _Done(Ticket):
    """Of an answer that was there already."""

    def cancel(self) -> None:
        """Nothing is left to cancel."""


class LocalHub(Hub):
    """Serves an engine's model under its policy. Safe from any thread.

    The engine must not be used by others meanwhile.

    Args:
        budgets: bytes that caches may take on the device and in host memory.
        eviction: the rule for who leaves a tier that is full.
        rows: the most answers that one pass goes on with.
        waiting: the most requests that wait.

    Raises:
        UsageError: the policy is not one that a server can follow.
    """

    def __init__(
        self,
        engine: Engine,
        budgets: Budgets = Budgets(),  # noqa: B008, frozen
        *,
        eviction: str = "lru",
        rows: int = 64,
        waiting: int = 1024,
        keeper: Keeper | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._clock, self._waiting = engine, clock, waiting
        self._rule = Rule.of(engine)
        self._exact = self._rule.exact() if self._rule.is_limited else self._rule
        self._ledger = ByteLedger(budgets)
        self._purse = Purse(self._ledger)
        self._sessions = Sessions(engine.scribe, clock)
        self._keeper = _Directory(self._sessions, self._forget, keeper or Keeper())
        leaving = EVICTIONS.load(eviction)()
        self._tiers = Tiers(self._ledger, self._purse, leaving, clock)
        decoder, scribe = engine.loaded.decoder, engine.scribe
        starting = Starting(self._tiers, self._purse, scribe, self._sessions.sharing)
        answering = Answering(decoder, scribe, engine.stops, starting, self._purse)
        self._scheduler = Scheduler(answering, starting, self._tiers, self._keeper, clock, rows)
        self._refused: Counter[str] = Counter()
        self._made = clock()
        self._thread = ModelThread(self._scheduler.step, self._scheduler.cancel_all)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        asked = self._clock()
        try:
            return self._thread.call(lambda: self._take(request, listener, asked))
        except Refusal as error:
            self._refused[error.code] += 1
            raise

    def models(self) -> tuple[Served, ...]:
        name = self._engine.loaded.name
        return (Served(name, str(self._rule), self._context, self._made),)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._thread.call(lambda: self._engine.scribe.encode(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        vocabulary = self._engine.loaded.decoder.vocabulary
        wrong = [token for token in ids if not 0 <= token < vocabulary]
        if wrong:
            raise invalid(
                f"Token id {wrong[0]} is outside the vocabulary of {vocabulary}: send ids of this "
                "model.",
                "tokens",
            )
        return self._thread.call(lambda: self._engine.scribe.decode(ids))

    def sessions(self, tenant: str) -> tuple[SessionView, ...]:
        return self._thread.call(lambda: tuple(map(view_of, self._sessions.of(tenant))))

    def session(self, tenant: str, name: str) -> SessionTurns:
        return self._thread.call(lambda: turns_of(self._sessions.find(tenant, name)))

    def open(self, tenant: str, name: str, turns: Sequence[Turn] = ()) -> SessionView:
        def made() -> Sitting:
            sitting = self._sessions.open(tenant, name, self._rule)
            sitting.opening = tuple(turns)
            return self._weighed(sitting)

        return self._thread.call(lambda: view_of(made()))

    def pin(self, tenant: str, name: str) -> SessionView:
        return self._thread.call(lambda: self._pinned(tenant, name, pinned=True))

    def unpin(self, tenant: str, name: str) -> SessionView:
        return self._thread.call(lambda: self._pinned(tenant, name, pinned=False))

    def release(self, tenant: str, name: str) -> SessionView:
        def released() -> SessionView:
            sitting = self._sessions.idle(tenant, name)
            self._tiers.drop(sitting)
            return view_of(sitting)

        return self._thread.call(released)

    def prefetch(self, tenant: str, name: str) -> SessionView:
        def fetched() -> SessionView:
            return view_of(self._on_device(self._sessions.idle(tenant, name)))

        return self._thread.call(fetched)

    def fork(self, tenant: str, name: str, new_name: str | None = None) -> SessionView:
        def forked() -> SessionView:
            source = self._sessions.idle(tenant, name)
            made = self._sessions.fork(source, new_name, source.rule, len(source.said))
            made.epoch = source.epoch
            if made.said:
                self._sessions.remember(made)
            return view_of(self._weighed(made))

        return self._thread.call(forked)

    def compact(self, tenant: str, name: str) -> SessionView:
        def compacted() -> SessionView:
            sitting = self._sessions.idle(tenant, name)
            if sitting.cache is not None:
                self._tiers.settle(sitting)
            return view_of(sitting)

        return self._thread.call(compacted)

    def export(self, tenant: str, name: str) -> bytes:
        return self._thread.call(lambda: archive.told(self._sessions.find(tenant, name)))

    def import_(self, tenant: str, name: str, data: bytes) -> SessionView:
        decoder = self._engine.loaded.decoder
        try:
            opening, said = archive.read(data, decoder.spec.fingerprint, decoder.vocabulary)
        except InputError as error:
            raise invalid(str(error)) from error

        def imported() -> SessionView:
            sitting = self._sessions.open(tenant, name, self._rule)
            sitting.opening, sitting.said, sitting.epoch = opening, said, len(said)
            if said:
                self._sessions.remember(sitting)
            return view_of(self._weighed(sitting))

        return self._thread.call(imported)

    def remove(self, tenant: str, name: str) -> None:
        self._thread.call(lambda: self._forget(self._sessions.idle(tenant, name)))

    def kept(self, tenant: str, name: str) -> Kept:
        def kept() -> Kept:
            sitting = self._sessions.find(tenant, name)
            if not sitting.is_answering:
                self._on_device(sitting)
            return kept_of(sitting)

        return self._thread.call(kept)

    def stats(self) -> Stats:
        told = self._scheduler, self._ledger, self._purse, self._tiers, self._sessions
        return self._thread.call(lambda: counted(*told, self._refused))

    def is_healthy(self) -> bool:
        return self._thread.is_alive

    def close(self) -> None:
        self._thread.close()

    def limit(self, tier: Tier, count: int) -> int:
        """Set a tier's budget while serving; bytes above it that go as soon as answers are done."""
        return self._thread.call(lambda: self._tiers.lower(tier, count))

    @property
    def _context(self) -> int | None:
        config = self._engine.loaded.decoder.module.config.get_text_config()
        return int(config.max_position_embeddings)

    def _take(self, request: Request, listener: Listener, asked: float) -> Ticket:
        """On the model's thread: find the session, and put the request in the queue."""
        if not self._thread.is_alive:
            raise closed()
        if self._scheduler.waiting >= self._waiting:
            raise overloaded(self._scheduler.waiting)
        if request.max_new_tokens < 1:
            raise invalid(
                f"At least 1 new token must be asked for, got {request.max_new_tokens}.",
                "max_tokens",
            )
        found = self._sessions.resolve(request, self._exact if request.exact else self._rule)
        if found.again is not None:
            return self._repeat(found, found.again, listener, asked)
        try:
            job = self._job(request, found, listener, asked)
        except BaseException:
            if not found.sitting.epoch and not found.sitting.is_answering:
                self._forget(found.sitting)
            raise
        self._scheduler.enqueue(job)
        self._thread.wake()
        return job

    def _job(self, request: Request, found: Resolved, listener: Listener, asked: float) -> Job:
        length, new_tokens = len(found.wanted), request.max_new_tokens
        if self._context is not None:
            if length >= self._context:
                raise too_long(length, self._context)
            new_tokens = min(new_tokens, self._context - length)
        sitting = found.sitting
        need = sitting.rule.need(Held(), length, new_tokens)
        if not self._purse.fits(sitting.tenant, need):
            raise too_much(
                BudgetError(
                    f"The conversation may come to {need.total} bytes of keys and values, more "
                    "than may be held: shorten it, ask for fewer new tokens, or raise the budget."
                )
            )
        told = request, listener, sitting, found.said, found.turns, found.wanted, new_tokens
        return Job(*told, Times(asked), self._thread.wake)

    def _repeat(self, found: Resolved, said: Said, listener: Listener, asked: float) -> Ticket:
        """Give an answer once more that was given before."""
        if said.text:
            listener.on_text(said.text)
        sitting, seconds = found.sitting, self._clock() - asked
        prompt = sitting.tokens - len(said.answer)
        view = view_of(sitting)
        counts = prompt, prompt, 0, 0, len(said.answer), view.evicted_tokens, view.merged_tokens
        told = sitting.name, *counts, sitting.is_lossless, sitting.tier, said.reason
        listener.on_done(Report(*told, 0.0, seconds, seconds))
        return _Done()

    def _pinned(self, tenant: str, name: str, *, pinned: bool) -> SessionView:
        sitting = self._sessions.find(tenant, name)
        sitting.is_pinned = pinned
        return view_of(sitting)

    def _on_device(self, sitting: Sitting) -> Sitting:
        """Bring a parked cache back, if there is room; what is nowhere stays so."""
        if sitting.parked is None:
            return sitting
        try:
            self._tiers.grant(sitting, sitting.rule.need(sitting.held, sitting.held.read, 0))
        except BudgetError as error:
            raise overloaded(self._scheduler.waiting) from error
        self._tiers.revive(sitting)
        self._tiers.settle(sitting)
        return sitting

    def _weighed(self, sitting: Sitting) -> Sitting:
        if not self._tiers.weigh(sitting):
            self._forget(sitting)
            raise too_much(BudgetError("There is no room for another session: remove some."))
        return sitting

    def _forget(self, sitting: Sitting) -> None:
        self._tiers.forget(sitting)
        self._sessions.forget(sitting)


class _Directory(Keeper):
    """Keeps the index of sessions, and hands turns on to whoever keeps them for good."""

    def __init__(
        self, sessions: Sessions, forget: Callable[[Sitting], None], keeper: Keeper
    ) -> None:
        self._sessions, self._forget, self._keeper = sessions, forget, keeper

    def commit(self, sitting: Sitting, said: Said) -> None:
        if len(sitting.said) == 1 or sitting.epoch == 1:
            self._sessions.remember(sitting)
        self._keeper.commit(sitting, said)

    def abandon(self, sitting: Sitting) -> None:
        self._forget(sitting)
        self._keeper.abandon(sitting)
