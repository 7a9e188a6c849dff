"""Decode steps: the next token of every running answer in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from larder.core.types import AppendKind, Mode
from larder.models.batch_segment import BatchSegment
from larder.models.decoder import Decoder
from larder.models.observers import JoinedObserver, Observer
from larder.server.request import TokenLogprob
from larder.server.request_state import RequestState
from larder.server.token_logprobs import TokenTexts, token_logprobs
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

STOP, LENGTH, CONTINUES = "stop", "length", ""


@dataclass(frozen=True)
class NextToken:
    """Token that a decode step has sampled, with its log-probabilities if they are wanted."""

    id: int
    logprob: TokenLogprob | None = None


# The finish reason, `CONTINUES` if the answer is not finished, or its error.
Outcome = str | Exception


class ModelRunner:
    """Runs decode steps over sequences with a cache each.

    Args:
        stops: token ids that end a turn.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: TokenizerAdapter, stops: frozenset[int]
    ) -> None:
        self._decoder, self._tokenizer, self._stops = decoder, tokenizer, stops
        self.interruptions = decoder.interruptions
        self._closing = tokenizer.end_of_turn_ids()
        self._texts = TokenTexts(tokenizer)

    def closing(self, state: RequestState) -> tuple[int, ...]:
        """Token ids that close an answer's turn; empty for a raw prompt, which has no turns."""
        return () if state.request.raw_prompt is not None else self._closing

    def step(
        self, states: Sequence[RequestState], failures: tuple[type[Exception], ...]
    ) -> Iterator[tuple[RequestState, Outcome]]:
        """Generate one token for each request. If the batch fails, each request is retried alone,
        so one cannot stop others.

        Args:
            failures: errors that end one answer only.
        """
        plans = [_plans(state) for state in states]
        try:
            tokens = self._tokens(states, failures)
        except failures as error:
            for state, before in zip(states, plans, strict=True):
                yield state, self._retry_alone(state, before, len(states), error, failures)
            return
        for state, token, before in zip(states, tokens, plans, strict=True):
            yield state, self._outcome(state, token, before, failures)

    def _retry_alone(
        self,
        state: RequestState,
        plans: int,
        batch_size: int,
        error: Exception,
        failures: tuple[type[Exception], ...],
    ) -> Outcome:
        if batch_size == 1:
            return _mark_unrecoverable(state, plans, error)
        try:
            if _plans(state) != plans:  # the failed step has evicted entries
                state.backend.restart_prefill(state)
                state.answer.num_unread = state.answer.step_tokens = 1
                return CONTINUES
            [token] = self._tokens([state], failures)
        except failures as retry_error:
            return _mark_unrecoverable(state, plans, retry_error)
        return self._outcome(state, token, plans, failures)

    def _tokens(
        self, states: Sequence[RequestState], failures: tuple[type[Exception], ...]
    ) -> list[NextToken | Exception]:
        """The next token of each request, or the error of its sampling; the
        forward pass was made."""
        rows = [self._segment(state) for state in states]
        observer = _observer(states, rows)
        ends = [stop - 1 for stop in accumulate(len(row.ids) for row in rows)]
        logits = self._decoder.forward_logits(rows, Mode.APPEND, ends, observer)
        tokens = list[NextToken | Exception]()
        for state, row_logits in zip(states, logits, strict=True):
            try:
                tokens.append(self._sampled(state, row_logits))
            except failures as error:
                tokens.append(error)
        return tokens

    def _sampled(self, state: RequestState, logits: Tensor) -> NextToken:
        assert state.answer.sampler is not None
        is_partial = state.answer.output_ids and state.answer.num_unread > state.answer.step_tokens
        if state.answer.finish_reason or is_partial:  # the end of the turn, or forced tokens
            return NextToken(-1)
        token = state.answer.sampler.sample(logits, state.answer.output_ids)
        num_top = state.request.logprobs
        if num_top is None:
            return NextToken(token)
        [logprob] = token_logprobs(logits[None], [token], num_top, self._texts)
        return NextToken(token, logprob)

    def _segment(self, state: RequestState) -> BatchSegment:
        coming = AppendKind.STEP if state.answer.output_ids else AppendKind.QUESTION
        kind = AppendKind.TEXT if state.answer.finish_reason else coming
        return BatchSegment(state.cache, state.step_ids, append_kind=kind)

    def _outcome(
        self,
        state: RequestState,
        token: NextToken | Exception,
        plans: int,
        failures: tuple[type[Exception], ...],
    ) -> Outcome:
        """Outcome of a token: the answer continues, ends now, or ends after a closing pass."""
        if isinstance(token, Exception):
            return _mark_unrecoverable(state, plans, token)
        try:
            state.backend.on_step(state, plans)
            if state.answer.finish_reason:
                return state.answer.finish_reason
            if token.id < 0:
                self._plan_step(state, state.answer.num_unread - state.answer.step_tokens)
                return CONTINUES
            reason = self._append(state, token)
        except failures as error:
            return error
        has_turn = reason and not state.request.is_ephemeral
        if has_turn and state.backend.needs_closing_pass(state, reason, self.closing(state)):
            return CONTINUES
        return reason

    def _append(self, state: RequestState, token: NextToken) -> str:
        """Append a token and stream its text; the finish reason, if the answer ends with it."""
        assert state.answer.stream is not None
        if token.id in self._stops:
            if state.request.prompt_logprobs and token.logprob is not None:
                state.answer.stream.add_logprob(token.logprob)
            return STOP
        assert state.answer.sampler is not None
        output_ids, forced = state.answer.output_ids, self._forced(state)
        tokens = [token.id, *forced[: state.new_tokens - len(output_ids) - 1]]
        for index, each in enumerate(tokens):
            if each in self._stops:
                return STOP
            output_ids.append(each)
            if not state.answer.stream.push(each, None if index else token.logprob):
                return STOP
        self._plan_step(state, len(tokens))
        if state.answer.sampler.is_complete and len(tokens) > len(forced):
            return STOP
        return LENGTH if len(output_ids) >= state.new_tokens else CONTINUES

    def _forced(self, state: RequestState) -> list[int]:
        """Tokens that the constraint forces behind the latest one and that the next step may read
        with it; log-probabilities need a step for each."""
        assert state.answer.sampler is not None
        if state.matcher is None or state.request.logprobs is not None:
            return []
        if state.backend.step_tokens(state) == 1:
            return []
        return state.answer.sampler.forced(self._decoder.vocab_size)

    def _plan_step(self, state: RequestState, num_unread: int) -> None:
        """Generated tokens that the next decode steps read."""
        state.answer.num_unread = num_unread
        if num_unread > 1:
            state.answer.step_tokens = min(num_unread, state.backend.step_tokens(state))
        else:
            state.answer.step_tokens = 1


def _plans(state: RequestState) -> int:
    return state.cache.plans


def _mark_unrecoverable(state: RequestState, plans: int, error: Exception) -> Exception:
    """Mark a cache that a failed step has changed irreversibly; the error."""
    if _plans(state) != plans:
        state.session.residency.settled_tokens = len(state.session.residency.cached_ids) + 1
    return error


def _observer(states: Sequence[RequestState], rows: Sequence[BatchSegment]) -> Observer | None:
    """Observer that lets each cache's policy act on its own row while text is generated."""
    observers: dict[int, Observer] = {}
    for index, (state, row) in enumerate(zip(states, rows, strict=True)):
        if state.answer.active_turn is None:
            continue
        turn, generated = state.answer.active_turn.reader, len(state.answer.output_ids)
        row_logits = (
            turn.last_observer(row, generated)
            if state.answer.finish_reason
            else turn.observer([0], [row], [generated])
        )
        if row_logits is not None:
            observers[index] = row_logits
    return JoinedObserver(observers) if observers else None
