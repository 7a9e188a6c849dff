"""Decode steps: the next token of every running answer in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from larder.core.types import AppendKind, Mode
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment, Observer
from larder.models.observers import JoinedObserver
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

    def closing(self, job: RequestState) -> tuple[int, ...]:
        """Token ids that close an answer's turn; empty for a raw prompt, which has no turns."""
        return () if job.request.raw_prompt is not None else self._closing

    def step(
        self, jobs: Sequence[RequestState], failures: tuple[type[Exception], ...]
    ) -> Iterator[tuple[RequestState, Outcome]]:
        """Generate one token for each request. If the batch fails, each request is retried alone,
        so one cannot stop others.

        Args:
            failures: errors that end one answer only.
        """
        plans = [_plans(job) for job in jobs]
        try:
            tokens = self._tokens(jobs, failures)
        except failures as error:
            for job, before in zip(jobs, plans, strict=True):
                yield job, self._retry_alone(job, before, len(jobs), error, failures)
            return
        for job, token, before in zip(jobs, tokens, plans, strict=True):
            yield job, self._outcome(job, token, before, failures)

    def _retry_alone(
        self,
        job: RequestState,
        plans: int,
        batch_size: int,
        error: Exception,
        failures: tuple[type[Exception], ...],
    ) -> Outcome:
        if batch_size == 1:
            return _mark_unrecoverable(job, plans, error)
        try:
            if _plans(job) != plans:  # the failed step has evicted entries
                job.backend.restart_prefill(job)
                job.answer.num_unread = job.answer.step_tokens = 1
                return CONTINUES
            [token] = self._tokens([job], failures)
        except failures as retry_error:
            return _mark_unrecoverable(job, plans, retry_error)
        return self._outcome(job, token, plans, failures)

    def _tokens(
        self, jobs: Sequence[RequestState], failures: tuple[type[Exception], ...]
    ) -> list[NextToken | Exception]:
        """The next token of each request, or the error of its sampling; the
        forward pass was made."""
        rows = [self._segment(job) for job in jobs]
        observer = _observer(jobs, rows)
        ends = [stop - 1 for stop in accumulate(len(row.ids) for row in rows)]
        logits = self._decoder.forward_logits(rows, Mode.APPEND, ends, observer)
        tokens = list[NextToken | Exception]()
        for job, row_logits in zip(jobs, logits, strict=True):
            try:
                tokens.append(self._sampled(job, row_logits))
            except failures as error:
                tokens.append(error)
        return tokens

    def _sampled(self, job: RequestState, logits: Tensor) -> NextToken:
        assert job.answer.sampler is not None
        is_partial = job.answer.output_ids and job.answer.num_unread > job.answer.step_tokens
        if job.answer.finish_reason or is_partial:  # the end of the turn, or forced tokens
            return NextToken(-1)
        token = job.answer.sampler.sample(logits, job.answer.output_ids)
        num_top = job.request.logprobs
        if num_top is None:
            return NextToken(token)
        [logprob] = token_logprobs(logits[None], [token], num_top, self._texts)
        return NextToken(token, logprob)

    def _segment(self, job: RequestState) -> BatchSegment:
        coming = AppendKind.STEP if job.answer.output_ids else AppendKind.QUESTION
        kind = AppendKind.TEXT if job.answer.finish_reason else coming
        return BatchSegment(job.cache, job.step_ids, append_kind=kind)

    def _outcome(
        self,
        job: RequestState,
        token: NextToken | Exception,
        plans: int,
        failures: tuple[type[Exception], ...],
    ) -> Outcome:
        """Outcome of a token: the answer continues, ends now, or ends after a closing pass."""
        if isinstance(token, Exception):
            return _mark_unrecoverable(job, plans, token)
        try:
            job.backend.on_step(job, plans)
            if job.answer.finish_reason:
                return job.answer.finish_reason
            if token.id < 0:
                self._plan_step(job, job.answer.num_unread - job.answer.step_tokens)
                return CONTINUES
            reason = self._append(job, token)
        except failures as error:
            return error
        has_turn = reason and not job.request.is_ephemeral
        if has_turn and job.backend.needs_closing_pass(job, reason, self.closing(job)):
            return CONTINUES
        return reason

    def _append(self, job: RequestState, token: NextToken) -> str:
        """Append a token and stream its text; the finish reason, if the answer ends with it."""
        assert job.answer.stream is not None
        if token.id in self._stops:
            if job.request.prompt_logprobs and token.logprob is not None:
                job.answer.stream.add_logprob(token.logprob)
            return STOP
        assert job.answer.sampler is not None
        output_ids, forced = job.answer.output_ids, self._forced(job)
        tokens = [token.id, *forced[: job.new_tokens - len(output_ids) - 1]]
        for place, each in enumerate(tokens):
            if each in self._stops:
                return STOP
            output_ids.append(each)
            if not job.answer.stream.push(each, None if place else token.logprob):
                return STOP
        self._plan_step(job, len(tokens))
        if job.answer.sampler.is_complete and len(tokens) > len(forced):
            return STOP
        return LENGTH if len(output_ids) >= job.new_tokens else CONTINUES

    def _forced(self, job: RequestState) -> list[int]:
        """Tokens that the constraint forces behind the latest one and that the next step may read
        with it; log-probabilities need a step for each."""
        assert job.answer.sampler is not None
        if job.matcher is None or job.request.logprobs is not None:
            return []
        if job.backend.step_tokens(job) == 1:
            return []
        return job.answer.sampler.forced(self._decoder.vocab_size)

    def _plan_step(self, job: RequestState, num_unread: int) -> None:
        """Generated tokens that the next decode steps read."""
        job.answer.num_unread = num_unread
        if num_unread > 1:
            job.answer.step_tokens = min(num_unread, job.backend.step_tokens(job))
        else:
            job.answer.step_tokens = 1


def _plans(job: RequestState) -> int:
    return job.cache.plans


def _mark_unrecoverable(job: RequestState, plans: int, error: Exception) -> Exception:
    """Mark a cache that a failed step has changed irreversibly; the error."""
    if _plans(job) != plans:
        job.session.residency.settled_tokens = len(job.session.residency.cached_ids) + 1
    return error


def _observer(jobs: Sequence[RequestState], rows: Sequence[BatchSegment]) -> Observer | None:
    """Observer that lets each cache's policy act on its own row while text is generated."""
    observers: dict[int, Observer] = {}
    for number, (job, row) in enumerate(zip(jobs, rows, strict=True)):
        if job.answer.active_turn is None:
            continue
        turn, generated = job.answer.active_turn.reader, len(job.answer.output_ids)
        row_logits = (
            turn.last_observer(row, generated)
            if job.answer.finish_reason
            else turn.observer([0], [row], [generated])
        )
        if row_logits is not None:
            observers[number] = row_logits
    return JoinedObserver(observers) if observers else None
