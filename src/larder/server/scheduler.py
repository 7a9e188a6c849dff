"""Who is served next: many conversations over one model, in steps that are short for all.

A step is one packed pass that gives every answer in the making its next token, then one block of
one turn. The block is of the tenant that was served least, as in Sheng et al., "Fairness in
Serving Large Language Models" (2024), arXiv:2401.00588, section 4, where a counter of tokens says
so and who comes back starts no lower than who is there; among its requests, of the one with least
left to read, but for who was passed over too often. So between two tokens of an answer there is
never more than one block, and whoever waits gets a block in the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from typing import Any

from larder.core.errors import BudgetError, LarderError
from larder.server.api_errors import kv_budget_exceeded
from larder.server.model_runner import ModelRunner
from larder.server.model_thread import CompletionQueue
from larder.server.persistence.base import Durability, SessionPersistence
from larder.server.persistence.retry_queue import WriteRetryQueue
from larder.server.request import Report
from larder.server.request_queue import RequestQueue
from larder.server.request_state import RequestState
from larder.server.session_state import SessionState
from larder.server.tiers.manager import TierManager

# What a pass or a listener may fail with. It ends one request, not the server.
FAILURES = (LarderError, RuntimeError, ValueError, TypeError, LookupError, MemoryError)
MAX_PASSED_BLOCKS = (
    8  # blocks for others of its tenant, after which a request gets one however long it is
)
SUMMED_FIELDS = tuple(f.name for f in fields(Report) if f.name.endswith("_tokens"))


class Scheduler:
    """Runs requests step by step. For one thread; `step` is all that ever uses the model.

    Args:
        queue: of who waits for memory.
        rows: the most answers that one pass goes on with.
        tasks: the most requests that have memory at a time.
    """

    def __init__(
        self,
        answering: ModelRunner,
        tiers: TierManager,
        keeper: SessionPersistence,
        news: CompletionQueue,
        unwritten: WriteRetryQueue,
        clock: Callable[[], float],
        queue: RequestQueue,
        rows: int = 64,
        tasks: int = 256,
    ) -> None:
        self._answering, self._tiers, self.queue = answering, tiers, queue
        self._keeper, self._news, self._unwritten = keeper, news, unwritten
        self._clock, self._rows, self._tasks = clock, rows, tasks
        self.running: list[RequestState] = []
        self.finishing: list[RequestState] = []  # answers that are complete, and are being written
        self._served: dict[str, float] = defaultdict(float)
        self.steps = self.blocks = 0
        self.done: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def enqueue(self, job: RequestState) -> None:
        """Take a request; its session is busy from now on."""
        tenant = job.sitting.tenant
        here = {each.sitting.tenant for each in self.running}.union(self.queue.tenants)
        if here and tenant not in here:
            least = min(self._served[each] for each in here)
            self._served[tenant] = max(self._served[tenant], least)
        job.sitting.is_answering = True
        self.queue.add(job)

    def step(self) -> bool:
        """Go on by one token of every answer and one block; False where there is nothing to do."""
        heard = self._news.tell()
        self._sweep()
        self._admit()
        ready = self._ready()
        asks, answered = any(job.reads_prompt_tail for job in ready), self._answer(ready)
        return heard or (not asks and self._read()) or answered  # a question is as long as a block

    def cancel_all(self) -> None:
        """Have nobody be served any more."""
        for job in [*self.running, *self.queue]:
            job.is_cancelled = True
        self._sweep()

    def _sweep(self) -> None:
        """Free what belongs to requests that nobody waits for."""
        for job in [job for job in self.running if job.is_cancelled]:
            job.manner.undo(job)
            self._close(job, "cancelled")
        for job in [job for job in self.queue if job.is_cancelled]:
            self.queue.remove(job)
            self._close(job, "cancelled")

    def _admit(self) -> None:
        """Start requests while there is room, the first of the tenant that was served least."""
        while self.queue and len(self.running) < self._tasks:
            tenant = min(self.queue.tenants, key=lambda each: self._served[each])
            job = self.queue.first(tenant)
            try:
                self._start(job)
            except BudgetError as error:
                if self.running or self.finishing or self._tiers.is_leaving:
                    return
                self.queue.remove(job)
                self._fail(job, kv_budget_exceeded(error))
            except FAILURES as error:
                self.queue.remove(job)
                job.manner.undo(job)
                self._fail(job, error)
            else:
                self.queue.remove(job)
                self.running.append(job)
                if job.fetch is not None:
                    self._news.hear(job.fetch.future, partial(self._arrived, job))

    def _start(self, job: RequestState) -> None:
        job.sitting.is_running = True
        try:
            job.manner.start(job)
        except BaseException:
            job.sitting.is_running = False
            raise
        job.times.started = self._clock()

    def _arrived(self, job: RequestState, _: Future[Any]) -> None:
        """What the store had of a cache is here, or is not to be had."""
        if job not in self.running:
            job.manner.give_up(job)
            return
        try:
            job.manner.on_loaded(job)
        except FAILURES as error:
            self.running.remove(job)
            job.manner.undo(job)
            self._fail(job, error)

    def _ready(self) -> list[RequestState]:
        """Answers that the next pass goes on with, in turns where they are too many.

        Of those that begin by reading a part of their prompt there is one at most.
        """
        ready = [job for job in self.running if job.is_prefilled]
        asking = [job for job in ready if job.reads_prompt_tail]
        later = set(map(id, asking)) - {id(min(asking, key=self._turn))} if asking else set[int]()
        return [job for job in ready if id(job) not in later][: self._rows]

    def _answer(self, ready: list[RequestState]) -> bool:
        """One token for every answer that is ready."""
        if not ready:
            return False
        self.steps += 1
        sizes = {id(job): len(job.unread) for job in ready}
        for job, outcome in self._answering.step(ready, FAILURES):
            self.running.remove(job)
            self._served[job.sitting.tenant] += sizes[id(job)]
            if isinstance(outcome, Exception):
                job.manner.undo(job)
                self._fail(job, outcome)
                continue
            if job.times.first is None:
                job.times.first = self._clock()
            if outcome:
                self._finish(job, outcome)
            else:
                self.running.append(job)  # behind those that this pass had no row for
        return True

    def _read(self) -> bool:
        """One block of one prompt."""
        left = [job for job in self.running if not job.is_prefilled and job.fetch is None]
        if not left:
            return False
        job = min(left, key=self._turn)
        for each in left:
            each.passed_blocks += each.sitting.tenant == job.sitting.tenant
        job.passed_blocks = 0
        self.blocks += 1
        try:
            self._served[job.sitting.tenant] += job.manner.read(job)
        except FAILURES as error:
            self.running.remove(job)
            job.manner.undo(job)
            self._fail(job, error)
        if job in self.running and job.has_ended:
            self._finish(self.running.pop(self.running.index(job)), job.ended)
        return True

    def _turn(self, job: RequestState) -> tuple[float, int, int]:
        return self._served[job.sitting.tenant], -(job.passed_blocks // MAX_PASSED_BLOCKS), job.left

    def _finish(self, job: RequestState, reason: str) -> None:
        """The answer is complete: keep the turn, then tell."""
        sitting = job.sitting
        assert job.stream is not None
        try:
            said = job.manner.file(job, reason, self._answering.closing(job))
        except FAILURES as error:
            job.manner.undo(job)
            self._fail(job, error)
            return
        sitting.said.append(said)
        sitting.pause(job.times.asked)
        sitting.epoch += 1
        job.was_new, sitting.is_provisional = sitting.is_provisional, False
        try:
            self._charge(sitting)
            written = self._keeper.commit(sitting, said)
        except FAILURES as error:
            self._take_back(job, error)
            return
        self.finishing.append(job)
        if self._tiers.vault.durability is Durability.NONE:
            self._news.track_write(sitting, written, partial(self._unwritten.note, sitting))
            self._told(job, reason)
        else:
            self._news.track_write(sitting, written, partial(self._written, job, reason))

    def _charge(self, sitting: SessionState) -> None:
        """Take what was said into host memory before anybody is told that it is kept.

        Raises:
            Refusal: it does not fit.
        """
        if not self._tiers.weigh(sitting):
            said = "There is no room for what was said: remove sessions, or raise --host-budget."
            raise kv_budget_exceeded(BudgetError(said))

    def _written(self, job: RequestState, reason: str, done: Future[Any] | None) -> None:
        """The turn is in the store, or could not be written."""
        error, job.durable = self._unwritten.outcome(job.sitting, done)
        if isinstance(error, Exception):
            self._take_back(job, error)
            return
        self._saved(job, partial(self._told, job, reason))

    def _saved(self, job: RequestState, then: Callable[[], None]) -> None:
        """Go on once nothing is left to be saved."""
        saving = self._tiers.save_at_once(job.sitting)
        if saving is None:
            then()
        else:
            self._news.track_write(job.sitting, saving, lambda _: self._saved(job, then))

    def _told(self, job: RequestState, reason: str) -> None:
        """Everything is kept that is to be."""
        assert job.stream is not None
        try:
            job.stream.finish()
            job.manner.accept(job)
            self._tiers.settle(job.sitting)
        except FAILURES as error:
            self._take_back(job, error)
            return
        self._saved(job, partial(self._close, job, reason))  # a chat's caches have the turn now

    def _take_back(self, job: RequestState, error: Exception) -> None:
        """A turn that could not be kept was never said."""
        sitting = job.sitting
        sitting.said.pop()
        sitting.epoch, sitting.is_provisional = sitting.epoch - 1, job.was_new
        job.manner.undo(job)
        self._fail(job, error)

    def _close(self, job: RequestState, reason: str) -> None:
        now = self._clock()
        report = job.report(reason, now)
        if reason != "cancelled":
            job.sitting.answered = now
        self._rest(job, now)
        self.sums.update({name: getattr(report, name) for name in SUMMED_FIELDS})
        self.done[reason] += 1
        job.listener.on_done(report)

    def _fail(self, job: RequestState, error: Exception) -> None:
        self._rest(job, self._clock())
        self.done["error"] += 1
        job.listener.on_error(error)

    def _rest(self, job: RequestState, now: float) -> None:
        """The request is over, however it went."""
        sitting = job.sitting
        for held in (self.running, self.finishing):
            if job in held:
                held.remove(job)
        sitting.is_answering = sitting.is_running = False
        sitting.last_used, sitting.uses = now, sitting.uses + 1
        sitting.steps = job.steps
        self._keeper.rest(sitting)
        if sitting.is_provisional or sitting.is_superseded:
            self._keeper.discard_new(sitting)
        else:
            self._tiers.weigh(sitting)
            self._tiers.logs.unload_idle()
