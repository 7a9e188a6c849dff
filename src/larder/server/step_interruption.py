"""Interruption of long calls: by decode steps, where a latency between tokens is to be held, and by
clients that leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from larder.core.errors import LarderError
from larder.models.call_interruption import CallInterruptions
from larder.server.request_state import RequestState
from larder.server.session_backend.base import SHORT_TAIL_TOKENS
from larder.server.token_budget import PrefillTokenBudget


class CallCancelled(LarderError):
    """Long call of which every request was cancelled meanwhile."""


class StepInterruption:
    """Decode steps between two layers of long calls: blocks of prompts, long ends of them, scoring
    passes. For the model's thread.

    A call whose requests were all cancelled ends before its next layer, with `CallCancelled`.

    Args:
        interruptions: of the decoder.
        token_budget: says when a step is due.
        answers: the answers in progress, at most a batch of them, without ends of prompts.
        decode: generates one token for each.
        failures: errors that end the request of an interrupted call. One of `decode` itself is none
            of that request: `allowed` raises it once the call is complete.
    """

    def __init__(
        self,
        interruptions: CallInterruptions,
        token_budget: PrefillTokenBudget,
        answers: Callable[[], list[RequestState]],
        decode: Callable[[list[RequestState]], None],
        failures: tuple[type[Exception], ...],
    ) -> None:
        self._interruptions, self._token_budget = interruptions, token_budget
        self._answers, self._decode, self._failures = answers, decode, failures
        self._is_allowed = False
        self._callers: Sequence[RequestState] = ()  # none during a step
        self._failure: Exception | None = None  # of the latest step

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Context of long calls that steps may interrupt; no step is interrupted itself."""
        self._is_allowed = True
        try:
            with self._interruptible():
                yield
        finally:
            self._is_allowed = False
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def calls_for(self, callers: Sequence[RequestState]) -> Iterator[None]:
        """Context of calls that end once all of these requests are cancelled.

        Raises:
            CallCancelled: a call has ended so.
        """
        former, self._callers = self._callers, callers
        try:
            with self._interruptible():
                yield
        finally:
            self._callers = former

    def _interruptible(self) -> AbstractContextManager[None]:
        return self._interruptions.by(self._before_layer, self._check_cancelled)

    def long_tails(self, states: Sequence[RequestState]) -> list[RequestState]:
        """Requests whose ends of prompts are so long that others need not wait for them; none
        without others."""
        if not self._token_budget.has_target:
            return []
        long = [state for state in states if state.reads_prompt_tail]
        long = [state for state in long if len(state.step_ids) > SHORT_TAIL_TOKENS]
        return long if len(long) < len(states) else []

    def _check_cancelled(self) -> None:
        if self._callers and all(state.is_cancelled for state in self._callers):
            raise CallCancelled("Every request of this call was cancelled.")

    def _before_layer(self) -> None:
        self._check_cancelled()
        if not self._is_allowed or not self._token_budget.is_step_due:
            return
        states = self._answers()
        if not states:
            return
        self._is_allowed = False
        try:
            with (
                self._token_budget.interruption(),
                self._token_budget.measured_step(),
                self.calls_for(()),
            ):
                self._decode(states)
        except self._failures as error:
            self._failure = error
        else:
            self._is_allowed = True
