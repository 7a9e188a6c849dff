"""From a request with a session to a cache that has read all but the prompt's last token."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError, Refused
from larder.engine.detokenizer import IncrementalDetokenizer
from larder.prefill.base import split_blocks
from larder.prefill.reader import PrefillSequence
from larder.server.request_state import CacheLoad, RequestState
from larder.server.session_backend.base import SessionBackend
from larder.server.session_state import TOKEN_TYPECODE, CompletedTurn, SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.disk import SLOWER_THAN_RECOMPUTE, WRITE_COPIES
from larder.server.tiers.manager import TierManager
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

# Given a sitting and a text, another of its tenant whose cache holds a part of the text.
FindPrefix = Callable[[SessionState, tuple[int, ...]], SessionState | None]


class PrefixBackend(SessionBackend):
    """Holds each session in one cache that keeps everything: finds the one to go on with, and reads
    what it lacks.

    Args:
        find: who else may have read the beginning of a text.
    """

    def __init__(
        self,
        tiers: TierManager,
        purse: DeviceReservations,
        scribe: TokenizerAdapter,
        find: FindPrefix,
    ) -> None:
        self._tiers, self._purse, self._scribe, self._find = tiers, purse, scribe, find

    def start(self, job: RequestState) -> None:
        sitting = job.sitting
        job.counts.tier = sitting.tier
        usable = _usable_tokens(job, sitting)
        if not usable and sitting.has_resident_cache:
            self._tiers.drop(sitting)
            usable = _usable_tokens(job, sitting)  # the store may have an earlier state
        if not usable:
            self._begin(job)
        elif sitting.has_resident_cache:
            self._go_on(job, usable)
        elif not self._fetch(job, sitting, usable):
            self._begin(job)
        if job.fetch is None:
            self._started(job)

    def on_loaded(self, job: RequestState) -> None:
        """What was fetched is here, or is not to be had: go on, or begin anew."""
        fetch, job.fetch = job.fetch, None
        assert fetch is not None
        sitting, error = job.sitting, fetch.future.exception()
        if error is not None:
            fetch.room.release()
            if not isinstance(error, Refused) or error.reason != SLOWER_THAN_RECOMPUTE:
                fetch.source.kept = None
            self._empty(sitting)
        else:
            self._take(sitting, fetch)
            self._cut(sitting, fetch.usable)
            sitting.origin = None
            sitting.note()
        self._started(job)

    def _take(self, sitting: SessionState, fetch: CacheLoad) -> None:
        try:
            told = fetch.source, fetch.kept, fetch.future.result(), fetch.room
            self._tiers.take(sitting, *told)
        except BaseException:
            if sitting.host is not fetch.room:  # else it goes with what is in it
                fetch.room.release()
            raise

    def give_up(self, job: RequestState) -> None:
        """Nobody waits any more for what was fetched."""
        if job.fetch is not None:
            job.fetch.room.release()
            job.fetch = None

    def _started(self, job: RequestState) -> None:
        """The cache is there: see what is left to be read."""
        cache = job.sitting.cache
        assert cache is not None
        job.mark = cache.next_position
        said = sum(each.tokens for each in job.said) - sum(each.unread for each in job.said[-1:])
        job.counts.cached = job.mark
        job.counts.restored = job.mark if job.counts.tier in ("host", "disk") else 0
        job.counts.recomputed = max(0, said - job.mark)
        self._lay_out(job, job.wanted)

    def read(self, job: RequestState) -> int:
        sitting, piece = job.sitting, job.pieces[job.place]
        cache = sitting.cache
        assert cache is not None
        reader, begun = sitting.rule.reader(len(job.wanted)), perf_counter()
        cache.reserve(len(piece))
        reader.append([PrefillSequence(cache, {})], piece)
        if 2 * len(piece) > sitting.rule.block:  # fewer take longer, each
            self._tiers.vault.note_reading(len(piece), perf_counter() - begun)
        sitting.read.extend(piece)
        self._purse.check(sitting.key, max(cache.nbytes, reader.meter.peak_bytes))
        job.place += 1
        if job.is_prefilled:
            self._prepare(job)
        return len(piece)

    def restart_prefill(self, job: RequestState) -> None:
        sitting = job.sitting
        sitting.cache, sitting.read, sitting.settled_tokens = (
            sitting.rule.empty(),
            array(TOKEN_TYPECODE),
            0,
        )
        job.mark = 0
        self._lay_out(job, (*job.wanted, *job.ids))

    def note(self, job: RequestState, plans: int) -> None:
        sitting = job.sitting
        self._purse.check(sitting.key, job.cache.nbytes)
        sitting.read.append(job.unread[0])
        if job.cache.plans != plans:
            sitting.settled_tokens = job.cache.next_position

    def needs_closing_pass(self, job: RequestState, reason: str, closing: tuple[int, ...]) -> bool:
        """As `Manner.goes_on`: the next turn reads that with its prompt."""
        del job, reason, closing
        return False

    def file(self, job: RequestState, reason: str, closing: tuple[int, ...]) -> CompletedTurn:
        sitting, read = job.sitting, job.cache.next_position
        unread = len(job.wanted) + len(job.ids) + len(closing) - read
        sitting.read = array(TOKEN_TYPECODE, (*job.wanted, *job.ids)[:read])
        sitting.note()
        return job.exchange(closing, unread, reason)

    def accept(self, job: RequestState) -> None:
        """As `Manner.accept`: the cache is there already."""

    def undo(self, job: RequestState) -> None:
        sitting, cache = job.sitting, job.sitting.cache
        mark = job.mark
        is_kept = sitting.rule.can_truncate and cache is not None and mark > 0
        if cache is None or not is_kept or mark < sitting.settled_tokens:
            self._tiers.drop(sitting)
            return
        cache.truncate(mark)
        sitting.read = sitting.read[:mark]
        sitting.note()
        self._tiers.settle(sitting)

    def _lay_out(self, job: RequestState, text: tuple[int, ...]) -> None:
        sitting = job.sitting
        job.pieces = split_blocks(text[len(sitting.read) : -1], sitting.rule.block)
        job.place = 0
        if job.is_prefilled:
            self._prepare(job)

    def _prepare(self, job: RequestState) -> None:
        """Everything is read: make ready to answer."""
        sitting, cache = job.sitting, job.sitting.cache
        assert cache is not None
        cache.reserve(job.new_tokens - len(job.ids))
        self._purse.check(sitting.key, cache.nbytes)
        if job.stream is None:
            stop = job.request.stop
            job.stream = IncrementalDetokenizer(self._scribe.decode, stop, job.listener.on_text)
            job.source = job.request.sampling.generator()

    def _go_on(self, job: RequestState, usable: int) -> None:
        """With the session's own cache."""
        sitting = job.sitting
        self._tiers.grant(sitting, self._need(job, sitting))
        if sitting.cache is None:
            self._tiers.restore_from_host(sitting)
        self._cut(sitting, usable)

    def _cut(self, sitting: SessionState, usable: int) -> None:
        """Forget what a text does not begin with."""
        assert sitting.cache is not None
        if usable < sitting.cache.next_position:
            sitting.cache.truncate(usable)
            sitting.read = sitting.read[:usable]

    def _fetch(self, job: RequestState, source: SessionState, usable: int) -> bool:
        """Have a cache come from the store; False where it is not worth trying.

        Raises:
            BudgetError: there is no device memory now.
        """
        sitting, kept = job.sitting, source.kept
        assert kept is not None
        needs = self._need(job, source), self._need(job, None)
        self._tiers.grant(
            sitting,
            MemoryDemand(
                max(each.bytes for each in needs), max(each.transient_bytes for each in needs)
            ),
        )
        room = self._tiers.host_room(sitting, kept.nbytes + WRITE_COPIES * kept.cache_bytes)
        if room is None:
            return False
        future = self._tiers.vault.load(source, kept)
        job.counts.tier = source.tier
        job.fetch = CacheLoad(source, kept, usable, room, future)
        return True

    def _empty(self, sitting: SessionState) -> None:
        """Begin with nothing, in memory that was granted."""
        sitting.origin = None
        sitting.cache, sitting.read, sitting.settled_tokens = (
            sitting.rule.empty(),
            array(TOKEN_TYPECODE),
            0,
        )
        sitting.is_coded, sitting.is_lossless = False, True

    def _begin(self, job: RequestState) -> None:
        """With a copy of another session's cache, or with nothing."""
        sitting = job.sitting
        source = self._source(job)
        if source is not None:
            try:
                if not source.has_resident_cache:
                    if self._fetch(job, source, source.usable(job.wanted)):
                        return
                else:
                    self._tiers.grant(sitting, self._need(job, source))
                    if self._copy(job, source):
                        return
            except BudgetError:
                pass  # a copy of all that the other holds may be more than the turn needs
        self._tiers.grant(sitting, self._need(job, None))
        self._empty(sitting)

    def _copy(self, job: RequestState, source: SessionState) -> bool:
        """Take over what another session has read; False if it has left meanwhile."""
        sitting = job.sitting
        usable = source.usable(job.wanted) if source.has_resident_cache else 0
        cache = self._copied(source) if usable else None
        if cache is None:
            return False
        if usable < cache.next_position:
            cache.truncate(usable)
            cache.compact()
        job.counts.tier = source.tier
        sitting.cache, sitting.read = cache, source.read[:usable]
        sitting.settled_tokens = min(source.settled_tokens, usable)
        sitting.is_coded, sitting.origin = source.is_coded, None
        sitting.note()
        return True

    def _copied(self, source: SessionState) -> SequenceCache | None:
        if source.cache is not None:
            return source.cache.fork()
        if source.parked is not None:
            return source.parked.copied(source.rule.desk.decoder.spec)
        return None

    def _source(self, job: RequestState) -> SessionState | None:
        """Who has read most of the text, and may share it."""
        sitting = job.sitting
        origin = sitting.origin
        own = (
            0 if origin is None or origin.rule is not sitting.rule else _usable_tokens(job, origin)
        )
        other = self._find(sitting, job.wanted)
        if other is not None and _usable_tokens(job, other) > own:
            return other
        return origin if own else None

    def _need(self, job: RequestState, source: SessionState | None) -> MemoryDemand:
        """Of the turn over what a session holds now."""
        held = job.sitting.held if source is None else source.held
        need = job.sitting.rule.lossless_turn_demand(held, len(job.wanted), job.new_tokens)
        if source is None:
            return need
        nbytes = source.nbytes
        return replace(
            need, bytes=max(need.bytes, nbytes), transient_bytes=max(need.transient_bytes, nbytes)
        )


def _usable_tokens(job: RequestState, sitting: SessionState) -> int:
    """How much of a text a session's cache can answer for; what lost something is not exact."""
    if job.request.exact and not sitting.is_lossless:
        return 0
    return sitting.usable(job.wanted)
