"""Completion of requests: turn stored, report sent, session released."""

from __future__ import annotations

from collections import Counter
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
from larder.server.request_queue import Programs
from larder.server.request_state import RequestState
from larder.server.session_index import SessionIndex
from larder.server.session_state import SessionState
from larder.server.tiers.manager import TierManager
from larder.server.token_budget import CallCancelled

# Errors of a step or a listener that end one request, not the server.
FAILURES = (LarderError, RuntimeError, ValueError, TypeError, LookupError, MemoryError)
SUMMED_FIELDS = tuple(f.name for f in fields(Report) if f.name.endswith("_tokens"))


class RequestFinisher:
    """Finishes requests that the scheduler no longer runs. For the model's thread.

    Args:
        forget: drops all that memory has of a session.
        programs: notes starts and answers, for the order of requests.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tiers: TierManager,
        sessions: SessionIndex,
        forget: Callable[[SessionState], None],
        persistence: SessionPersistence,
        completions: CompletionQueue,
        unwritten: WriteRetryQueue,
        clock: Callable[[], float],
        programs: Programs,
    ) -> None:
        self._runner, self._tiers, self._sessions, self._forget = runner, tiers, sessions, forget
        self._persistence, self._completions, self._unwritten = persistence, completions, unwritten
        self._clock, self._programs = clock, programs
        self.finishing: list[RequestState] = []  # complete answers whose turns are being written
        self.done: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def finish(self, state: RequestState, reason: str) -> None:
        """The answer is complete: store the turn, then report."""
        session = state.session
        usage = session.usage
        assert state.answer.stream is not None
        if state.request.is_ephemeral:
            state.answer.stream.finish()
            state.backend.rollback(state)
            self.close(state, reason)
            return
        try:
            turn = state.backend.prepare_turn(state, reason, self._runner.closing(state))
        except FAILURES as error:
            state.backend.rollback(state)
            self.fail(state, error)
            return
        session.turns.append(turn)
        usage.record_think_time(state.times.arrived)
        session.transcript.epoch += 1
        state.was_new, usage.is_provisional = usage.is_provisional, False
        try:
            self._charge(session)
            if len(session.turns) == 1 or session.transcript.epoch == 1:
                self._sessions.index_session(session)
            written = self._persistence.commit(session, turn)
        except FAILURES as error:
            self._rollback(state, error)
            return
        self.finishing.append(state)
        if self._tiers.disk.durability is Durability.NONE:
            self._completions.track_write(session, written, partial(self._unwritten.note, session))
            self._turn_stored(state, reason)
        else:
            self._completions.track_write(
                session, written, partial(self._on_written, state, reason)
            )

    def close(self, state: RequestState, reason: str) -> None:
        """Report a request that has ended, and release its session."""
        now = self._clock()
        report = state.report(reason, now)
        if reason != "cancelled":
            state.session.usage.answered = now
            self._tiers.note_use(state.session)
            self._programs.note_answer(state.session, state.next_tool)
        self._release(state, now)
        self.sums.update({name: getattr(report, name) for name in SUMMED_FIELDS})
        self.done[reason] += 1
        state.listener.on_done(report)

    def fail(self, state: RequestState, error: Exception) -> None:
        """Report the error of a request, and release its session."""
        if isinstance(error, CallCancelled):
            return self.close(state, "cancelled")
        self._release(state, self._clock())
        self.done["error"] += 1
        state.listener.on_error(error)

    def _charge(self, session: SessionState) -> None:
        """Charge the transcript to host memory before the turn is reported as stored.

        Raises:
            ApiError: 400 `kv_budget_exceeded`.
        """
        if not self._tiers.charge_transcript(session):
            message = (
                "Host memory has no room for the transcript: remove sessions, or raise "
                "--host-budget."
            )
            raise kv_budget_exceeded(BudgetError(message))

    def _on_written(self, state: RequestState, reason: str, future: Future[Any] | None) -> None:
        """The turn's write has ended, successful or not."""
        error, state.durable = self._unwritten.outcome(state.session, future)
        if isinstance(error, Exception):
            self._rollback(state, error)
            return
        self._save_then(state, partial(self._turn_stored, state, reason))

    def _save_then(self, state: RequestState, callback: Callable[[], None]) -> None:
        """Continue once no cache of the session is left to save."""
        saving = self._tiers.save_at_once(state.session)
        if saving is None:
            callback()
        else:
            self._completions.track_write(
                state.session, saving, lambda _: self._save_then(state, callback)
            )

    def _turn_stored(self, state: RequestState, reason: str) -> None:
        """The turn is stored as far as it will be: commit it."""
        assert state.answer.stream is not None
        try:
            state.answer.stream.finish()
            state.backend.commit_turn(state)
            self._tiers.shrink_to_fit(state.session)
        except FAILURES as error:
            self._rollback(state, error)
            return
        # Chat caches contain the turn only now.
        self._save_then(state, partial(self.close, state, reason))

    def _rollback(self, state: RequestState, error: Exception) -> None:
        """Roll back a turn that could not be stored."""
        session = state.session
        session.turns.pop()
        session.transcript.epoch -= 1
        session.usage.is_provisional = state.was_new
        state.backend.rollback(state)
        self.fail(state, error)

    def _release(self, state: RequestState, now: float) -> None:
        """Release the session of a request that has ended in any way."""
        session = state.session
        usage = session.usage
        if state in self.finishing:
            self.finishing.remove(state)
        usage.is_answering = usage.is_running = False
        usage.last_used, usage.uses = now, usage.uses + 1
        usage.workflow_steps = state.workflow_steps
        self._persistence.locks.release(session)
        if usage.is_provisional or session.durability.is_superseded:
            self._forget(session)
        else:
            self._tiers.charge_transcript(session)
            self._tiers.transcripts.unload_idle()
