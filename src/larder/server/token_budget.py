"""Token budget of prefill: prompt tokens between two tokens of running answers, for a latency; and
interruption of long calls of the model by decode steps and cancellations.

Of Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (2024),
arXiv:2403.02310, section 4: chunks of a prompt are read beside decode steps, as long as the latency
between tokens allows. What differs: the paper profiles a model for one budget in advance; here the
seconds of steps and chunks are measured while serving, so that chunks become shorter as the prompt
before them, and the attention to it, grows. Where chunks take more or less than such an estimate,
as beside other work of the machine, they are sized for the slow ones among the latest. And where a
chunk still takes too long, or a policy reads whole blocks, decode steps run between its layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import inf
from time import perf_counter

import numpy as np

from larder.core.errors import BadParameter, LarderError
from larder.models.call_interruption import CallInterruptions
from larder.server.request_state import RequestState
from larder.server.session_backend.base import SHORT_TAIL_TOKENS

MIN_CHUNK_TOKENS = 16  # however slow the machine is
PROMPT_SHARE = 0.25  # of the target at least is for prompts, however slow a decode step is
MAX_SAMPLES = 32  # chunks that an estimate is made from
SLOW_SHARE = 0.9  # quantile of chunks, by what they took beside the estimate, that is in time
SMOOTHING = 0.3  # weight of the latest decode step
GROWTH = 2  # a chunk is at most so much longer than those before it
TOKENS, CACHED = 512.0, 4096.0  # units of the estimate


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


class PrefillTokenBudget:
    """Most tokens of the next chunk of a prompt. For the model's thread.

    Args:
        target_seconds: wanted between two tokens of an answer; None for no budget.
        clock: seconds that never go back.

    Raises:
        BadParameter: the target is not a positive number.
    """

    def __init__(
        self, target_seconds: float | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        if target_seconds is not None and not 0 < target_seconds < inf:
            raise BadParameter(
                f"inter_token_seconds must be more than 0 and finite, got {target_seconds}: give "
                "None for no target."
            )
        self._target, self._clock = target_seconds, clock
        self._step_seconds = 0.0
        self._step_ended = 0.0
        self.interrupted_seconds = 0.0  # of decode steps between the layers of chunks, in all
        self._chunks = deque[tuple[int, int, float]](maxlen=MAX_SAMPLES)
        self.has_answers = False  # running ones, which wait for each chunk

    @property
    def has_target(self) -> bool:
        """True if chunks are sized."""
        return self._target is not None

    @contextmanager
    def measured_step(self, tails: Sequence[bool] = ()) -> Iterator[None]:
        """Context of a decode step, which is measured unless it reads ends of prompts as well.

        Args:
            tails: whether each of its requests reads one.
        """
        started = self._now()
        yield
        self._step_ended = self._now()
        if not any(tails):
            weight = SMOOTHING if self._step_seconds else 1.0
            self._step_seconds += weight * (self._step_ended - started - self._step_seconds)

    @contextmanager
    def interruption(self) -> Iterator[None]:
        """Context of what runs between the layers of a chunk, and is no part of its seconds."""
        started = self._now()
        yield
        self.interrupted_seconds += self._now() - started

    @property
    def is_step_due(self) -> bool:
        """True if the answers have waited for a decode step so long that one must start now."""
        if self._target is None:
            return False
        return self._now() - self._step_ended >= self._prompt_seconds(self._target)

    def _prompt_seconds(self, target: float) -> float:
        """Seconds between two decode steps that are for prompts."""
        return max(target - self._step_seconds, PROMPT_SHARE * target)

    @contextmanager
    def measured_chunk(self, cached: int) -> Iterator[list[int]]:
        """Context of a chunk of a prompt, which is measured; the numbers of tokens that are read
        are added to the list.

        Args:
            cached: tokens before it.
        """
        started, counts = self._now() - self.interrupted_seconds, list[int]()
        yield counts
        if sum(counts):
            seconds = self._now() - self.interrupted_seconds - started
            self._chunks.append((sum(counts), cached, seconds))

    def _now(self) -> float:
        return self._clock() if self.has_target else 0.0

    def limit(self, cached: int, most: int) -> int:
        """Tokens of the next chunk, at most `most`.

        Args:
            cached: tokens before it.
        """
        if self._target is None or not self.has_answers:
            return most
        if not self._chunks:
            return min(most, MIN_CHUNK_TOKENS)
        seconds = self._prompt_seconds(self._target)
        constant, per_token, per_pair = self._costs()
        rate = per_token / TOKENS + per_pair * cached / (TOKENS * CACHED)
        seconds /= self._slowness(constant, per_token, per_pair)
        longest = GROWTH * max(tokens for tokens, _, _ in self._chunks)
        wanted = longest if rate <= 0 else max(0.0, seconds - constant) / rate
        return min(most, max(MIN_CHUNK_TOKENS, int(min(wanted, longest))))

    def _slowness(self, constant: float, per_token: float, per_pair: float) -> float:
        """Duration of slow chunks relative to its estimate; 1 at least."""
        tokens, cached, seconds = np.array(self._chunks, dtype=np.float64).T
        tokens = tokens / TOKENS
        estimates = constant + tokens * (per_token + per_pair * cached / CACHED)
        if not estimates.all():
            return 1.0
        return max(1.0, float(np.quantile(seconds / estimates, SLOW_SHARE)))

    def _costs(self) -> list[float]:
        """Seconds of a chunk, of its tokens, and of their pairs with those before; by least
        squares, none negative.
        """
        tokens, cached, seconds = np.array(self._chunks, dtype=np.float64).T
        tokens = tokens / TOKENS
        features = np.stack([np.ones_like(tokens), tokens, tokens * cached / CACHED], 1)
        used, costs = [0, 1, 2], np.zeros(3)
        while used:
            found = np.linalg.lstsq(features[:, used], seconds, rcond=None)[0]
            if (found >= 0).all():
                costs[used] = found
                break
            del used[int(found.argmin())]
        return costs.tolist()
