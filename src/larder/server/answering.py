"""The next token of many answers in one pass through the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from larder.core.types import Coming, Mode
from larder.models.decoder import Decoder
from larder.models.passes import Observer, Recorded, Row
from larder.server.budget import Purse
from larder.server.job import Job
from larder.server.starting import Starting
from larder.session.transcript import Scribe

STOP, LENGTH, ON = "stop", "length", ""

# A reason why the answer ended, `ON` where it goes on, or what went wrong.
Outcome = str | Exception


class Answering:
    """Goes on with answers, each over its own cache.

    Args:
        stops: token ids that end a turn.
    """

    def __init__(
        self,
        decoder: Decoder,
        scribe: Scribe,
        stops: frozenset[int],
        starting: Starting,
        purse: Purse,
    ) -> None:
        self._decoder, self._scribe, self._stops = decoder, scribe, stops
        self._starting, self._purse = starting, purse
        self._closing = scribe.closing()

    def closing(self, job: Job) -> tuple[int, ...]:
        """What ends an answer's turn; nothing behind a text that knows no turns."""
        return () if job.request.raw_prompt is not None else self._closing

    def step(
        self, jobs: Sequence[Job], failures: tuple[type[Exception], ...]
    ) -> Iterator[tuple[Job, Outcome]]:
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
        job: Job,
        plans: int,
        beside: int,
        error: Exception,
        failures: tuple[type[Exception], ...],
    ) -> Outcome:
        if beside == 1:
            return _spoiled(job, plans, error)
        try:
            if _plans(job) != plans:  # entries are gone that the failed pass has judged
                self._starting.read_again(job)
                return ON
            [token] = self._tokens([job], failures)
        except failures as own:
            return _spoiled(job, plans, own)
        return self._told(job, token, plans, failures)

    def _tokens(
        self, jobs: Sequence[Job], failures: tuple[type[Exception], ...]
    ) -> list[int | Exception]:
        """What is said next, one token each, or why none could be chosen: the pass was made."""
        rows = [self._row(job) for job in jobs]
        observer = _observer(jobs, rows)
        logits = self._decoder.predict(rows, Mode.APPEND, list(range(len(rows))), observer)
        tokens = list[int | Exception]()
        for job, own in zip(jobs, logits, strict=True):
            assert job.source is not None
            try:
                tokens.append(job.request.sampling.choose(own, job.source))
            except failures as error:
                tokens.append(error)
        return tokens

    def _row(self, job: Job) -> Row:
        assert job.sitting.cache is not None
        coming = Coming.STEP if job.ids else Coming.QUESTION
        return Row(job.sitting.cache, job.unread, coming=coming)

    def _told(
        self, job: Job, token: int | Exception, plans: int, failures: tuple[type[Exception], ...]
    ) -> Outcome:
        """Tell the listener of a token."""
        if isinstance(token, Exception):
            return _spoiled(job, plans, token)
        assert job.stream is not None and job.sitting.cache is not None
        self._purse.check(job.sitting.key, job.sitting.cache.nbytes)
        job.sitting.read.append(job.unread[0])
        if _plans(job) != plans:
            job.sitting.settled = job.sitting.cache.next_position
        if token in self._stops:
            return STOP
        job.ids.append(token)
        try:
            goes_on = job.stream.push(token)
        except failures as error:
            return error
        if not goes_on:
            return STOP
        return LENGTH if len(job.ids) >= job.new_tokens else ON


def _plans(job: Job) -> int:
    assert job.sitting.cache is not None
    return job.sitting.cache.plans


def _spoiled(job: Job, plans: int, error: Exception) -> Exception:
    """The error; a cache that was changed for good halfway cannot be taken back."""
    if _plans(job) != plans:
        job.sitting.settled = len(job.sitting.read) + 1
    return error


def _observer(jobs: Sequence[Job], rows: Sequence[Row]) -> Observer | None:
    """Has each cache be tended by its own policy's part that acts while text is generated."""
    watching: dict[int, Observer] = {}
    for number, (job, row) in enumerate(zip(jobs, rows, strict=True)):
        if job.tending is not None:
            watching[number] = job.tending.observer([0], [row], [len(job.ids)])
    if not watching:
        return None

    def observe(row: int, layer: int, recorded: Recorded) -> None:
        if row in watching:
            watching[row](0, layer, recorded)

    return observe
