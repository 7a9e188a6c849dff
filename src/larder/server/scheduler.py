"""Scheduler: decode steps, prefill blocks and preemption of requests, fair between tenants.

A step is one decode step of all running answers, then one prefill block of one request, which short
blocks of others fill up, as long as the latency between tokens allows (`PrefillTokenBudget`). Ends
of prompts are read in a decode step in place of a block, several if they are no longer together,
and never in two steps in a row while others wait for a block. Requests with the lowest priority
number come first in all that follows. Among them the block goes to the tenant with the least
service, as in Sheng et al., "Fairness in Serving Large Language Models" (2024), arXiv:2401.00588,
section 4: a counter of tokens per tenant, where a tenant that returns starts no lower than those
that are present. Among a tenant's requests it goes to the one with the fewest blocks left, unless
another was passed over `MAX_PASSED_BLOCKS` times. So two tokens of an answer are never more than
one block apart, and no request starves but by requests of a lower number. Requests of one tenant
may instead come by the first arrival of their programs, admission and blocks alike
(`SchedulingPolicy.PROGRAM_FCFS`). A block, or the long end of a prompt, that takes longer than the
latency between tokens allows is interrupted between two layers for decode steps. A request that
waits for memory takes that of a running one of a higher number (preemption): its cache leaves the
device as idle ones do, and its answer goes on later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from larder.core.errors import BudgetError, TenantBudgetError
from larder.server.api_errors import kv_budget_exceeded
from larder.server.model_runner import ModelRunner, Outcome
from larder.server.model_thread import CompletionQueue
from larder.server.request_finisher import FAILURES, RequestFinisher
from larder.server.request_queue import Programs, RequestQueue
from larder.server.request_state import RequestState
from larder.server.session_backend.base import WriteAwaited
from larder.server.tiers.manager import TierManager
from larder.server.token_budget import PrefillTokenBudget, StepInterruption
from larder.store.ledger import Tier

MOST_RUNNING = 256  # requests that are admitted at a time


class Scheduler:
    """Runs requests step by step. For one thread; only `step` uses the model.

    Args:
        queue: requests that wait for memory.
        finisher: stores the turns of complete answers, and releases sessions.
        rows: maximum number of sequences in one decode step.
        token_budget: of prompts, beside answers.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tiers: TierManager,
        completions: CompletionQueue,
        clock: Callable[[], float],
        queue: RequestQueue,
        finisher: RequestFinisher,
        programs: Programs,
        rows: int = 64,
        token_budget: PrefillTokenBudget | None = None,
    ) -> None:
        self._runner, self._tiers, self._completions = runner, tiers, completions
        self.queue, self.finisher, self.programs = queue, finisher, programs
        self._token_budget = token_budget or PrefillTokenBudget()
        self._clock, self._rows = clock, rows
        self._interruption = StepInterruption(
            runner.interruptions, self._token_budget, self._answers, self._decode, FAILURES
        )
        self.running: list[RequestState] = []
        self._has_tails = False  # the latest step has read ends of prompts
        self._ended: list[tuple[RequestState, str]] = []  # answers, with their finish reasons
        self._served: dict[str, float] = defaultdict(float)
        self.steps = self.blocks = self.preemptions = self._arrived = 0

    def enqueue(self, state: RequestState) -> None:
        """Queue a request; its session is busy from now on."""
        tenant = state.session.tenant
        present = {each.session.tenant for each in self.running}.union(self.queue.tenants)
        if present and tenant not in present:
            least = min(self._served[each] for each in present)
            self._served[tenant] = max(self._served[tenant], least)
        state.session.usage.is_answering = True
        self._arrived += 1
        state.order = self._arrived
        self.programs.note_arrival(state)
        self.queue.add(state)

    def step(self) -> bool:
        """One decode step of all answers and one prefill block; False if there
        was nothing to do."""
        was_completed = self._completions.run_ready()
        self._sweep()
        self._admit()
        ready = self._ready()
        self._has_tails = any(state.reads_prompt_tail for state in ready)
        self._token_budget.has_answers = bool(ready)
        answered = self._decode_apart(ready)
        # Prompt tails take the place of a block.
        was_read = not self._has_tails and self._prefill()
        self._finish_ended()
        return was_completed or was_read or answered

    def cancel_all(self) -> None:
        """Cancel all requests."""
        for state in [*self.running, *self.queue]:
            state.is_cancelled = True
        self._sweep()

    def _sweep(self) -> None:
        """Close cancelled requests."""
        for state in [state for state in self.running if state.is_cancelled]:
            self.running.remove(state)
            state.backend.rollback(state)
            self.finisher.close(state, "cancelled")
        for state in [state for state in self.queue if state.is_cancelled]:
            self.queue.remove(state)
            if state.num_preemptions:
                state.backend.abandon(state)
            self.finisher.close(state, "cancelled")

    def _admit(self) -> None:
        """Admit requests while there is memory, first those of the lowest priority number, and
        among them those of the tenant with the least service. A tenant that waits for memory of its
        own budget holds up no other."""
        full = set[str]()  # tenants whose own budget is used up
        while len(self.running) < MOST_RUNNING:
            firsts = [self.queue.first(each) for each in self.queue.tenants if each not in full]
            if not firsts or not self._try_admit(min(firsts, key=self._rank), full):
                return

    def _try_admit(self, state: RequestState, full: set[str]) -> bool:
        """Admit a request, fail it, or leave it in the queue; False if all others wait, too.

        Args:
            full: tenants whose own budget is used up; that of the request is added if it waits
                without holding up others.
        """
        try:
            self._start(state)
        except WriteAwaited:
            full.add(state.session.tenant)
            return True
        except BudgetError as error:
            return self._make_room(state, error, full)
        except FAILURES as error:
            self.queue.remove(state)
            state.backend.rollback(state)
            self.finisher.fail(state, error)
            return True
        self.queue.remove(state)
        self.running.append(state)
        if state.prefill.load is not None:
            self._completions.when_done(state.prefill.load.future, partial(self._on_loaded, state))
        return True

    def _make_room(self, state: RequestState, error: BudgetError, full: set[str]) -> bool:
        """Free memory for a request that `error` has refused, or let it wait for running ones; it
        fails if there are none. Arguments and result as for `_try_admit`."""
        is_own = isinstance(error, TenantBudgetError)
        if self._preempt_for(state, is_own, error.tier):
            return True
        tenant = state.session.tenant
        if self._holders(state, is_own) or self._tiers.is_writing(tenant if is_own else None):
            if is_own:
                full.add(tenant)
            return is_own
        if state.session.residency.is_resident:  # its own cache, beside that of the turn
            self._tiers.drop(state.session)
            return True
        self.queue.remove(state)
        self.finisher.fail(state, kv_budget_exceeded(error))
        return True

    def _rank(self, state: RequestState) -> tuple[int, float]:
        """Order in which requests of different tenants come."""
        return state.request.priority, self._served[state.session.tenant]

    def _holders(self, state: RequestState, is_own: bool) -> list[RequestState]:
        """Requests that hold memory which a waiting one could have.

        Args:
            is_own: the budget of its tenant is used up, so that only those of this tenant do.
        """
        tenant = state.session.tenant
        holding = (*self.running, *self.finisher.finishing)
        return [each for each in holding if not is_own or each.session.tenant == tenant]

    def _preempt_for(self, state: RequestState, is_own: bool, tier: str) -> bool:
        """Take the memory of a running request that comes after another one; False if there is
        none.

        Args:
            is_own: as for `_holders`.
            tier: name of the tier that is full.
        """
        later = [
            each
            for each in self._holders(state, is_own)
            if each.request.priority > state.request.priority
            and each.can_be_preempted
            and each in self.running
            # Host memory is short: one that holds none of it would stop for nothing.
            and (tier != Tier.HOST.value or each.session.residency.reserved_bytes)
        ]
        if not later:
            return False
        # The one that has come least far among those of the highest number.
        victim = max(later, key=lambda each: (each.request.priority, -len(each.known_ids)))
        self.running.remove(victim)
        try:
            victim.backend.preempt(victim)
        except FAILURES as error:
            victim.backend.rollback(victim)
            self.finisher.fail(victim, error)
            return True
        victim.answer.num_unread = victim.answer.step_tokens = 1
        victim.num_preemptions += 1
        victim.session.usage.is_running = False
        self.preemptions += 1
        self.queue.add(victim)
        return True

    def _start(self, state: RequestState) -> None:
        state.session.usage.is_running = True
        state.was_resident = state.session.residency.is_resident
        try:
            state.backend.start(state)
        except BaseException:
            state.session.usage.is_running = False
            raise
        if state.times.started is None:
            state.times.started = self._clock()
            self.programs.note_start(state, state.times.started)

    def _on_loaded(self, state: RequestState, _: Future[Any]) -> None:
        """The cache load of a request has ended, successful or not."""
        if state not in self.running:
            state.backend.abandon_load(state)
            return
        try:
            state.backend.on_loaded(state)
        except FAILURES as error:
            self.running.remove(state)
            state.backend.rollback(state)
            self.finisher.fail(state, error)

    def _ready(self) -> list[RequestState]:
        """Requests in the next decode step, by priority, in rotation if there are more than `rows`.

        Several start with a prompt tail if all of these tails together are no longer than a block;
        none does behind a step with some while others wait for a block.
        """
        ready = [state for state in self.running if state.prefill.is_done]
        tails = sorted((state for state in ready if state.reads_prompt_tail), key=self._priority)
        is_blocked = self._has_tails and bool(self._unread())
        later, tail_len = set[int](), 0
        for state in tails:
            tail_len += len(state.step_ids)
            if is_blocked or (
                state is not tails[0] and tail_len > state.backend.step_tail_tokens(state)
            ):
                later.add(id(state))
        ready = [state for state in ready if id(state) not in later]
        return sorted(ready, key=lambda state: state.request.priority)[: self._rows]

    def _decode_apart(self, ready: list[RequestState]) -> bool:
        """One token for every answer that is ready: behind all others for those with long ends of
        prompts, between whose layers these go on, if there is a latency to hold."""
        long = self._interruption.long_tails(ready)
        others = [state for state in ready if state not in long]
        if others:
            tails = [state.reads_prompt_tail for state in others]
            with self._token_budget.measured_step(tails), self._interruption.calls_for(others):
                self._decode(others)
        self._finish_ended()
        if long:
            with self._interruption.allowed(), self._interruption.calls_for(long):
                self._decode(long)
        return bool(ready)

    def _answers(self) -> list[RequestState]:
        """Answers in progress, in the next decode step that reads no ends of prompts."""
        running = [state for state in self.running if not state.is_cancelled]
        ready = [state for state in running if state.prefill.is_done and state.answer.output_ids]
        return sorted(ready, key=lambda state: state.request.priority)[: self._rows]

    def _decode(self, states: list[RequestState]) -> None:
        """One token for every answer."""
        self.steps += 1
        sizes = {id(state): len(state.step_ids) for state in states}
        for state, outcome in self._runner.step(states, FAILURES):
            self._served[state.session.tenant] += sizes[id(state)]
            self._note_outcome(state, outcome)

    def _finish_ended(self) -> None:
        """Finish answers that have ended; passes that this takes can be interrupted."""
        with self._interruption.allowed():
            while self._ended:
                self.finisher.finish(*self._ended.pop(0))

    def _note_outcome(self, state: RequestState, outcome: Outcome) -> None:
        """Account for what a decode step has made of a request."""
        self.running.remove(state)
        if isinstance(outcome, Exception):
            state.backend.rollback(state)
            self.finisher.fail(state, outcome)
            return
        if state.times.first is None:
            state.times.first = self._clock()
        if outcome:
            self._ended.append((state, outcome))
        else:
            self.running.append(state)  # after those that were not in this decode step

    def _unread(self) -> list[RequestState]:
        """Requests that wait for a prefill block."""
        return [
            state
            for state in self.running
            if not state.prefill.is_done and state.prefill.load is None
        ]

    def _prefill(self) -> bool:
        """One prefill block of one request, and of others as long as all of them are no longer."""
        left = self._unread()
        if not left:
            return False
        state, *others = sorted(left, key=self._priority)
        for each in left:
            each.prefill.passed_blocks += each.session.tenant == state.session.tenant
        self.blocks += 1
        with self._token_budget.measured_chunk(len(state.session.residency.cached_ids)) as counts:
            with self._interruption.allowed():
                counts += self._read_blocks(state, others)
        return True

    def _read_blocks(self, state: RequestState, others: Sequence[RequestState]) -> list[int]:
        """Read the next block of a request, and of others that fill it up; numbers of tokens."""
        companions = state.backend.companions(state, others) if others else []
        if companions:
            try:
                with self._interruption.calls_for([state, *companions]):
                    state.backend.read_together([state, *companions])
            except FAILURES:  # nothing was read: the request whose turn it is goes alone
                companions = []
        read = state.backend.finish_block if companions else state.backend.prefill_block
        for each in (state, *companions):
            each.prefill.passed_blocks = 0
        return [self._finish_block(each, read) for each in (state, *companions)]

    def _finish_block(self, state: RequestState, read: Callable[[RequestState], int]) -> int:
        """Account for a block of a request, which `read` counts; the number of its tokens."""
        count = 0
        try:
            with self._interruption.calls_for([state]):
                count = read(state)
            self._served[state.session.tenant] += count
        except FAILURES as error:
            self.running.remove(state)
            state.backend.rollback(state)
            self.finisher.fail(state, error)
        if state in self.running and state.has_ended:
            self.finisher.finish(
                self.running.pop(self.running.index(state)), state.answer.finish_reason
            )
        return count

    def _priority(self, state: RequestState) -> tuple[int | float, ...]:
        return (*self._rank(state), *self.queue.policy.prefill_rank(state))
