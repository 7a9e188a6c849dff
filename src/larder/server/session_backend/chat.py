"""Sessions that are held as `larder chat` holds its own: the same caches, and the same answers.

What such a turn takes, `larder.session.chat_cache` does, here in steps that are no longer than a
block. Three things differ from a chat. A message longer than M is not refused: all but its last
block is read as a context is, on a copy of the cache. The end of a turn is read before the turn is
filed. And episodes that have grown too large are built anew when the next turn begins.

A cache that was given up is built again from what was said: from where all was read anew last,
turn by turn, token by token where that makes a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from larder.core.errors import BudgetError, LarderError, Refused
from larder.engine.detokenizer import IncrementalDetokenizer
from larder.server.admission import chat_turn_demand
from larder.server.request_state import CacheLoad, RequestState
from larder.server.session_backend.base import SessionBackend
from larder.server.session_backend.chat_prefill import ChatPrefill, PrefillSteps
from larder.server.session_state import CompletedTurn, PositionMaps, SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.disk import SLOWER_THAN_RECOMPUTE, WRITE_COPIES
from larder.server.tiers.manager import TierManager
from larder.session.chat_cache import ChatCache
from larder.session.chat_state import ActiveTurn
from larder.session.transcript.chat_log import ChatTurn
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.store.ledger import Tier


class ChatBackend(SessionBackend):
    """Holds each session in a cabinet."""

    def __init__(
        self, tiers: TierManager, purse: DeviceReservations, scribe: TokenizerAdapter
    ) -> None:
        self._tiers, self._purse, self._scribe = tiers, purse, scribe
        self._courses = ChatPrefill(scribe, tiers.vault)

    def start(self, job: RequestState) -> None:
        sitting, said = job.sitting, _tokens(job.said)
        if sitting.chat_cache is not None and not self._courses.leads_on(job, sitting.chat_cache):
            self._tiers.drop(sitting)
        job.counts.tier, held, source = sitting.tier, sitting.chat_cache, self._source(job)
        episodes = 0 if held is None else len(held.caches)
        if source is not None and source.kept is not None:
            episodes = max(episodes, source.kept.caches)
        told = len(job.wanted), len(job.wanted) - said, job.new_tokens
        job.new_ids = job.wanted[said:] if job.said else job.wanted[self._courses.skipped(job) :]
        self._grant(sitting, chat_turn_demand(sitting.rule, *told, episodes))
        if held is None:
            job.counts.tier = self._take_over(job)
            if sitting.chat_cache is None and source is not None and self._fetch(job, source):
                return
        self._tiers.restored["host"] += job.counts.tier == "host"
        self._started(job)

    def _started(self, job: RequestState) -> None:
        """The caches are there, or are to be built: see what is left to be read."""
        sitting, said = job.sitting, _tokens(job.said)
        if sitting.chat_cache is not None:
            exchanges = len(sitting.chat_cache.state.log.exchanges)
            job.mark = job.counts.cached = _tokens(job.said[:exchanges])
            job.counts.restored = job.mark if job.counts.tier in ("host", "disk") else 0
        job.counts.recomputed = said - job.mark
        unread = len(job.wanted) - job.mark
        job.ahead, job.course = unread // sitting.rule.block, self._courses.course(job)

    def read(self, job: RequestState) -> int:
        sitting = job.sitting
        assert job.course is not None
        job.ahead -= 1
        begun = perf_counter()
        try:
            next(job.course)
            job.seconds += perf_counter() - begun
        except StopIteration:
            job.course = None
            if job.stream is None:
                stop = job.request.stop
                job.stream = IncrementalDetokenizer(self._scribe.decode, stop, job.listener.on_text)
                job.source = job.request.sampling.generator()
        self._check(job)
        return sitting.rule.block

    def restart_prefill(self, job: RequestState) -> None:
        job.active_turn = job.completed_turn = job.turn_commit = None
        job.course = self._courses.course(job)

    def note(self, job: RequestState, plans: int) -> None:
        del plans
        self._check(job)
        assert job.active_turn is not None
        if not job.ended and job.active_turn.turn.free_tokens < 1:
            job.course = job.active_turn.turn.end_block_steps(1)

    def needs_closing_pass(self, job: RequestState, reason: str, closing: tuple[int, ...]) -> bool:
        drawer = job.active_turn
        assert drawer is not None
        ids, job.course = (*job.new_ids, *job.ids, *closing), None
        job.tail, job.ended = ids[drawer.cache.next_position - drawer.mark :], reason
        if drawer.turn.is_within_after(len(job.tail)):
            return bool(job.tail)
        job.course = self._ending(job, drawer, closing)
        return True

    def file(self, job: RequestState, reason: str, closing: tuple[int, ...]) -> CompletedTurn:
        sitting = job.sitting
        if job.completed_turn is None:
            assert sitting.chat_cache is not None and job.active_turn is not None
            said = job.completed_turn = job.exchange(closing, len(job.tail), reason)
            exchange = ChatTurn(job.turns[-1].text, said.text, (*job.new_ids, *said.answer))
            job.turn_commit = sitting.chat_cache.file(job.active_turn, exchange)
        return job.completed_turn

    def _ending(
        self, job: RequestState, drawer: ActiveTurn, closing: tuple[int, ...]
    ) -> PrefillSteps:
        """Read the end of a turn, and bring the cache that holds it back to its budget."""
        yield from drawer.turn.closing_steps(job.tail, len(job.ids))
        self.file(job, job.ended, closing)
        assert job.turn_commit is not None
        if job.turn_commit.number == drawer.number:
            yield from drawer.turn.end_turn_steps()

    def accept(self, job: RequestState) -> None:
        sitting, drawer = job.sitting, job.active_turn
        assert sitting.chat_cache is not None and drawer is not None and job.turn_commit is not None
        start = sitting.chat_cache.length
        sitting.chat_cache.accept(drawer, job.turn_commit)
        sitting.spots.file(drawer.number, job.turn_commit.number, drawer.mark, start)
        drawer.cache.compact()
        job.active_turn, sitting.episode = None, drawer.number
        sitting.read = sitting.ids
        sitting.note()

    def undo(self, job: RequestState) -> None:
        sitting, drawer = job.sitting, job.active_turn
        if job.course is not None:
            job.course.close()
        job.course = job.active_turn = None
        if drawer is not None and sitting.chat_cache is not None:
            if drawer.can_be_undone:
                sitting.chat_cache.undo(drawer)
            else:
                self._tiers.drop(sitting)
        if sitting.chat_cache is None:
            self._tiers.drop(sitting)
        elif not _is_complete(
            sitting.chat_cache, job
        ):  # of a turn that was not kept, or not all was heard
            self._tiers.drop(sitting)
        else:
            self._tiers.settle(sitting)

    def on_loaded(self, job: RequestState) -> None:
        """What was fetched is here, or is not to be had: go on, or read all again."""
        fetch, job.fetch = job.fetch, None
        assert fetch is not None
        sitting, error = job.sitting, fetch.future.exception()
        if error is None:
            try:
                told = fetch.source, fetch.kept, fetch.future.result(), fetch.room
                self._tiers.take(sitting, *told)
            except LarderError as refused:  # it was counted
                error = refused
            except BaseException:  # who undoes this knows of no room but the session's
                self._tiers.chats.return_reservation(sitting, fetch.room)
                raise
        if error is not None:
            self._tiers.chats.return_reservation(sitting, fetch.room)
            job.counts.tier = "none"
            if not isinstance(error, Refused) or error.reason != SLOWER_THAN_RECOMPUTE:
                fetch.source.kept = None
        sitting.origin = None
        self._started(job)

    def give_up(self, job: RequestState) -> None:
        """Nobody waits any more for what was fetched."""
        if job.fetch is not None:
            job.fetch.room.release()
            job.fetch = None

    def _grant(self, sitting: SessionState, need: MemoryDemand) -> None:
        before = 0 if sitting.host is None else sitting.host.bytes
        self._tiers.chats.hold(sitting, max(before, need.host))
        try:
            self._tiers.grant(sitting, need)
        except BudgetError:
            self._tiers.chats.give_back(sitting, before)
            raise

    def _source(self, job: RequestState) -> SessionState | None:
        """Whose caches in the store the session can go on with: its own, or what it began as."""
        sitting, said = job.sitting, _tokens(job.said)
        for each in (sitting, sitting.origin):
            if each is not None and each.kept is not None and each.rule is sitting.rule:
                if each.kept.tokens <= said:
                    return each
        return None

    def _fetch(self, job: RequestState, source: SessionState) -> bool:
        """Have caches come from the store; False where there is no host memory for them."""
        kept = source.kept
        assert kept is not None
        room = self._tiers.chats.set_aside(
            job.sitting, kept.nbytes + WRITE_COPIES * kept.cache_bytes
        )
        if room is None:
            return False
        future = self._tiers.vault.load(source, kept)
        job.counts.tier, job.fetch = (
            Tier.DISK.value,
            CacheLoad(source, kept, kept.tokens, room, future),
        )
        return True

    def _take_over(self, job: RequestState) -> str:
        """Begin as another session that has come to the same point; the tier of its caches."""
        sitting, origin = job.sitting, job.sitting.origin
        sitting.origin = None
        if origin is None or origin.chat_cache is None or origin.is_running:
            return "none"
        if origin.rule is not sitting.rule:
            return "none"
        sitting.chat_cache = origin.chat_cache.before(len(job.said))
        if sitting.chat_cache is not None:
            sitting.read, sitting.is_coded = sitting.ids, origin.is_coded
        sitting.episode, sitting.base = origin.episode, min(origin.base, len(job.said))
        sitting.found, sitting.spots = origin.found, PositionMaps(dict(origin.spots.own))
        return sitting.tier

    def _check(self, job: RequestState) -> None:
        """Compare what is held with what was spoken for."""
        sitting, drawer = job.sitting, job.active_turn
        device, host = sitting.device_bytes, sitting.host_bytes
        copy = None if drawer is None else drawer.copy
        if copy is not None:
            device += copy.device_nbytes
            host += copy.nbytes - copy.device_nbytes - copy.shared_nbytes
        if sitting.chat_cache is not None:
            device = max(device, sitting.chat_cache.refresh_meter.peak_live_bytes)
        self._purse.check(sitting.key, device)
        if host > (0 if sitting.host is None else sitting.host.bytes):
            self._tiers.chats.hold(sitting, host)


def _is_complete(cabinet: ChatCache, job: RequestState) -> bool:
    """Whether a session's caches are of all that was said."""
    return len(cabinet.state.log.exchanges) == len(job.said)


def _tokens(said: Sequence[CompletedTurn]) -> int:
    return sum(each.tokens for each in said)
