"""The next token of many answers in one pass through the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from larder.core.types import AppendKind, Mode
from larder.models.decoder import Decoder
from larder.models.forward_batch import BatchSegment, LayerActivations, Observer
from larder.server.request_state import RequestState
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

STOP, LENGTH, CONTINUES = "stop", "length", ""

# A reason why the answer ended, `CONTINUES` where it goes on, or what went wrong.
Outcome = str | Exception


class ModelRunner:
    """Goes on with answers, each over its own cache.

    Args:
        stops: token ids that end a turn.
    """

    def __init__(
        self,
        decoder: Decoder,
        scribe: TokenizerAdapter,
        stops: frozenset[int],
    ) -> None:
        self._decoder, self._scribe, self._stops = decoder, scribe, stops
        self._closing = scribe.closing()

    def closing(self, job: RequestState) -> tuple[int, ...]:
        """What ends an answer's turn; nothing behind a text that knows no turns."""
        return () if job.request.raw_prompt is not None else self._closing

    def step(
        self, jobs: Sequence[RequestState], failures: tuple[type[Exception], ...]
    ) -> Iterator[tuple[RequestState, Outcome]]:
        """One token for each. If a pass fails, each answer is tried alone: one cannot stop others.

        Args:
            failures: what may go wrong for one answer.
        """
        plans = [_plans(job) for job in jobs]
        try:
            tokens = self._tokens(jobs, failures)
        except failures as error:
            for job, before in zip(jobs, plans, strict=True):
                yield job, self._alone(job, before, len(jobs), error, failures)
            return
        for job, token, before in zip(jobs, tokens, plans, strict=True):
            yield job, self._told(job, token, before, failures)

    def _alone(
        self,
        job: RequestState,
        plans: int,
        beside: int,
        error: Exception,
        failures: tuple[type[Exception], ...],
    ) -> Outcome:
        if beside == 1:
            return _mark_unrecoverable(job, plans, error)
        try:
            if _plans(job) != plans:  # entries are gone that the failed pass has judged
                job.manner.restart_prefill(job)
                return CONTINUES
            [token] = self._tokens([job], failures)
        except failures as own:
            return _mark_unrecoverable(job, plans, own)
        return self._told(job, token, plans, failures)

    def _tokens(
        self, jobs: Sequence[RequestState], failures: tuple[type[Exception], ...]
    ) -> list[int | Exception]:
        """What is said next, one token each, or why none could be chosen: the pass was made."""
        rows = [self._row(job) for job in jobs]
        observer = _observer(jobs, rows)
        ends = [stop - 1 for stop in accumulate(len(row.ids) for row in rows)]
        logits = self._decoder.forward_logits(rows, Mode.APPEND, ends, observer)
        tokens = list[int | Exception]()
        for job, own in zip(jobs, logits, strict=True):
            assert job.source is not None
            try:
                tokens.append(job.request.sampling.choose(own, job.source))
            except failures as error:
                tokens.append(error)
        return tokens

    def _row(self, job: RequestState) -> BatchSegment:
        coming = AppendKind.STEP if job.ids else AppendKind.QUESTION
        kind = AppendKind.TEXT if job.ended else coming
        return BatchSegment(job.cache, job.unread, append_kind=kind)

    def _told(
        self,
        job: RequestState,
        token: int | Exception,
        plans: int,
        failures: tuple[type[Exception], ...],
    ) -> Outcome:
        """What comes of a token: the answer goes on, or ends at once or after one more pass."""
        if isinstance(token, Exception):
            return _mark_unrecoverable(job, plans, token)
        try:
            job.manner.note(job, plans)
            if job.ended:
                return job.ended
            reason = self._heard(job, token)
        except failures as error:
            return error
        if reason and job.manner.needs_closing_pass(job, reason, self.closing(job)):
            return CONTINUES
        return reason

    def _heard(self, job: RequestState, token: int) -> str:
        """Tell the listener of a token; why the answer ends with it, if it does."""
        assert job.stream is not None
        if token in self._stops:
            return STOP
        job.ids.append(token)
        if not job.stream.push(token):
            return STOP
        return LENGTH if len(job.ids) >= job.new_tokens else CONTINUES


def _plans(job: RequestState) -> int:
    return job.cache.plans


def _mark_unrecoverable(job: RequestState, plans: int, error: Exception) -> Exception:
    """The error; a cache that was changed for good halfway cannot be taken back."""
    if _plans(job) != plans:
        job.sitting.settled_tokens = len(job.sitting.read) + 1
    return error


def _observer(jobs: Sequence[RequestState], rows: Sequence[BatchSegment]) -> Observer | None:
    """Has each cache be tended by its own policy's part that acts while text is generated."""
    watching: dict[int, Observer] = {}
    for number, (job, row) in enumerate(zip(jobs, rows, strict=True)):
        if job.active_turn is None:
            continue
        turn, said = job.active_turn.turn, len(job.ids)
        own = turn.last_observer(row, said) if job.ended else turn.observer([0], [row], [said])
        if own is not None:
            watching[number] = own
    if not watching:
        return None

    def observe(row: int, layer: int, recorded: LayerActivations) -> None:
        if row in watching:
            watching[row](0, layer, recorded)

    return observe
