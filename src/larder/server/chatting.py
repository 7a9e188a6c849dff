"""Sessions that are held as `larder chat` holds its own: the same caches, and the same answers.

What such a turn takes, `larder.session.filing` does, here in steps that are no longer than a block.
Three things differ from a chat. A message longer than M is not refused: all but its last block is
read as a context is, on a copy of the cache. A prompt longer than a block is read in blocks. And
caches that have grown too large are built anew when the next turn begins.

A cache that was given up is built again from what was said: from where all was read anew last,
turn by turn, token by token where that makes a difference.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from larder.core.conversation import Conversation, Message
from larder.core.errors import BudgetError, LarderError
from larder.core.types import Coming
from larder.engine.beginning import NOTHING
from larder.engine.streaming import TextStream
from larder.models.decoder import Decoder
from larder.prefill.base import pieces
from larder.prefill.meter import Meter
from larder.prefill.reader import Lane
from larder.server.begun import Begun
from larder.server.budget import Need, Purse
from larder.server.chat_needs import chat_need
from larder.server.job import Job
from larder.server.manner import Manner
from larder.server.sitting import Said, Sitting
from larder.server.spots import AllSpots
from larder.server.tiers import Tiers
from larder.session.filing import Cabinet
from larder.session.log import Exchange, Log
from larder.session.reading import books_for, gathering, reader_of, tend
from larder.session.rooms import tokens_of
from larder.session.snapshot import State
from larder.session.transcript import Scribe

Course = Generator[object, None, None]


class Chatting(Manner):
    """Holds each session in a cabinet."""

    def __init__(self, tiers: Tiers, purse: Purse, decoder: Decoder, scribe: Scribe) -> None:
        self._tiers, self._purse, self._decoder, self._scribe = tiers, purse, decoder, scribe

    def start(self, job: Job) -> None:
        sitting, said = job.sitting, sum(each.tokens for each in job.said)
        if sitting.cabinet is not None and not _fits(sitting.cabinet, job):
            self._tiers.drop(sitting)
        tier, held = sitting.tier, sitting.cabinet
        episodes = 0 if held is None else len(held.shelf)
        told = len(job.wanted), len(job.wanted) - said, job.new_tokens
        job.added = job.wanted[said:] if job.said else job.wanted[self._history(job)[1] :]
        self._grant(sitting, chat_need(sitting.rule, *told, episodes))
        if held is None:
            tier = self._take_over(job)
        if sitting.cabinet is None:
            job.counts.recomputed = said
        else:
            job.mark = job.counts.cached = said
            job.counts.restored = said if tier == "host" else 0
        job.counts.tier = tier
        self._tiers.restored["host"] += tier == "host"
        unread = len(job.wanted) - job.mark
        job.ahead, job.course = unread // sitting.rule.block, self._course(job)

    def read(self, job: Job) -> int:
        sitting = job.sitting
        assert job.course is not None
        job.ahead -= 1
        try:
            next(job.course)
        except StopIteration:
            job.course = None
            if job.stream is None:
                stop = job.request.stop
                job.stream = TextStream(self._scribe.decode, stop, job.listener.on_text)
                job.source = job.request.sampling.generator()
        self._check(job)
        return sitting.rule.block

    def read_again(self, job: Job) -> None:
        job.drawer, job.course = None, self._course(job)

    def note(self, job: Job, plans: int) -> None:
        del plans
        self._check(job)

    def goes_on(self, job: Job, reason: str, closing: tuple[int, ...]) -> bool:
        drawer = job.drawer
        assert drawer is not None
        ids = (*job.added, *job.ids, *closing)
        job.tail, job.ended = ids[drawer.cache.next_position - drawer.mark :], reason
        return bool(job.tail)

    def file(self, job: Job, reason: str, closing: tuple[int, ...]) -> Said:
        sitting = job.sitting
        assert sitting.cabinet is not None and job.drawer is not None
        said = job.exchange(closing, len(job.tail), reason)
        exchange = Exchange(job.turns[-1].text, said.text, (*job.added, *said.answer))
        job.filed = sitting.cabinet.file(job.drawer, exchange)
        return said

    def accept(self, job: Job) -> None:
        sitting, drawer = job.sitting, job.drawer
        assert sitting.cabinet is not None and drawer is not None and job.filed is not None
        start = sitting.cabinet.length
        sitting.cabinet.accept(drawer, job.filed)
        sitting.spots.file(drawer.number, job.filed.number, drawer.mark, start)
        drawer.cache.compact()
        job.drawer, sitting.episode = None, drawer.number
        sitting.read = sitting.ids
        sitting.note()

    def undo(self, job: Job) -> None:
        sitting, drawer = job.sitting, job.drawer
        if job.course is not None:
            job.course.close()
        job.course = job.drawer = None
        if drawer is not None and not drawer.is_copy:
            if drawer.cache.plans != job.plans:
                self._tiers.drop(sitting)
            else:
                drawer.cache.truncate(drawer.mark)
        if sitting.cabinet is None:
            self._tiers.drop(sitting)
        else:
            self._tiers.settle(sitting)

    def arrive(self, job: Job) -> None:
        """As `Manner.arrive`: nothing was fetched."""

    def give_up(self, job: Job) -> None:
        """As `Manner.give_up`: nothing was fetched."""

    def _grant(self, sitting: Sitting, need: Need) -> None:
        before = 0 if sitting.host is None else sitting.host.bytes
        self._tiers.chats.hold(sitting, max(before, need.host))
        try:
            self._tiers.grant(sitting, need)
        except BudgetError:
            self._tiers.chats.hold(sitting, before)
            raise

    def _take_over(self, job: Job) -> str:
        """Begin as another session that has come to the same point; the tier of its caches."""
        sitting, origin = job.sitting, job.sitting.origin
        sitting.origin = None
        if origin is None or origin.cabinet is None or origin.is_running:
            return "none"
        if origin.rule is not sitting.rule:
            return "none"
        sitting.cabinet = origin.cabinet.before(len(job.said))
        sitting.episode, sitting.base = origin.episode, min(origin.base, len(job.said))
        sitting.found, sitting.spots = origin.found, AllSpots(dict(origin.spots.own))
        return sitting.tier

    def _check(self, job: Job) -> None:
        """Compare what is held with what was spoken for."""
        sitting, drawer = job.sitting, job.drawer
        device, host = sitting.device_bytes, sitting.host_bytes
        if drawer is not None and drawer.is_copy:
            copy = drawer.cache
            device += copy.fast_nbytes
            host += copy.nbytes - copy.fast_nbytes - copy.shared_nbytes
        if sitting.cabinet is not None:
            device = max(device, sitting.cabinet.building.peak_live_bytes)
        self._purse.check(sitting.key, device)
        if host > (0 if sitting.host is None else sitting.host.bytes):
            self._tiers.chats.hold(sitting, host)

    def _course(self, job: Job) -> Course:
        """From what there is of a session to a cache that has read all but the prompt's end."""
        sitting = job.sitting
        if sitting.cabinet is None:
            sitting.cabinet = yield from self._rebuilt(job)
        else:
            sitting.cabinet.building = Meter()
        yield from _refreshing(sitting, sitting.cabinet)
        begun = yield from self._begun(sitting, sitting.cabinet, job.turns[-1].text, job.added)
        drawer, job.tending = begun.drawer, begun.tending
        job.drawer, job.plans = drawer, drawer.cache.plans
        room = len(job.added) + job.new_tokens + len(self._scribe.closing())
        drawer.cache.reserve(room if job.tending is None else 1)
        *chunks, job.asked = begun.chunks
        for chunk in chunks:
            begun.read(chunk, Coming.QUESTION)
            yield
        if job.ids:  # they were said before, and are read once more
            begun.read(job.asked, Coming.QUESTION)
            yield from begun.speak(tuple(job.ids[:-1]))

    def _rebuilt(self, job: Job) -> Generator[object, None, Cabinet]:
        """Everything that was said, read anew."""
        sitting, desk = job.sitting, job.sitting.rule.desk
        history, skipped = self._history(job)
        log = Log(history, tuple(_exchanges(job.said, skipped)))
        before = replace(log, exchanges=log.exchanges[: sitting.base])
        sitting.spots = AllSpots()
        meter, source = Meter(), before.source(before.transcript(self._scribe))
        memory = yield from gathering(desk, source, sitting.rule.policy, {}, meter)
        cabinet = Cabinet(desk, State(memory, before))
        cabinet.building = meter
        done = len(before.exchanges)
        for said, exchange in list(zip(job.said, log.exchanges, strict=True))[done:]:
            yield from _refreshing(sitting, cabinet)
            yield from self._heard(sitting, cabinet, said, exchange)
        return cabinet

    def _heard(self, sitting: Sitting, cabinet: Cabinet, said: Said, exchange: Exchange) -> Course:
        """A turn once more, as it was when it was said."""
        answer, closing = tuple(said.answer), self._scribe.closing()
        prompt = exchange.ids[: len(exchange.ids) - len(answer)]
        begun = yield from self._begun(sitting, cabinet, exchange.question, prompt)
        for chunk in begun.chunks:
            begun.read(chunk, Coming.QUESTION)
            yield
        stop = len(answer) - said.unread
        yield from begun.speak(answer[:stop])
        generated = len(answer) - (len(closing) if answer[-len(closing) :] == closing else 0)
        if answer[stop:]:
            begun.read(answer[stop:], Coming.TEXT, generated)
        drawer, filed = begun.drawer, cabinet.file(begun.drawer, exchange)
        sitting.spots.file(drawer.number, filed.number, drawer.mark, cabinet.length)
        cabinet.accept(drawer, filed)
        drawer.cache.compact()
        yield

    def _begun(
        self, sitting: Sitting, cabinet: Cabinet, question: str, prompt: tuple[int, ...]
    ) -> Generator[object, None, Begun]:
        """A turn on the cache for its question, which is yet to read the last of the prompt."""
        policy, desk, block = sitting.rule.policy, sitting.rule.desk, sitting.rule.block
        drawer, tending = cabinet.draw(question)
        if len(prompt) > tokens_of(policy):
            drawer = drawer if drawer.is_copy else drawer.copied()
            head, prompt = prompt[:-block], prompt[-block:]
            book = books_for(desk, cabinet.state.memory.router, {})[drawer.number]
            reader = reader_of(desk, policy, drawer.mark + len(head), Meter())
            yield from policy.schedule.steps(reader, [Lane(drawer.cache, book)], head)
            tending = tend(desk, policy, [drawer.cache])
        return Begun(self._decoder, drawer, tending, tuple(pieces(prompt, block)))

    def _history(self, job: Job) -> tuple[Conversation, int]:
        """What was said before the first question, and how many tokens that is."""
        first = job.said[0].turns if job.said else job.turns
        prompt = tuple(job.said[0].prompt) if job.said else job.wanted
        if len(first) < 2:
            return NOTHING, 0
        messages = tuple(Message(turn.role, turn.text) for turn in first[:-1])
        history = Conversation(job.sitting.root, messages)
        try:
            ids = self._scribe.write(history).ids
        except LarderError:  # not every template can be closed anywhere
            return NOTHING, 0
        return (history, len(ids)) if prompt[: len(ids)] == ids else (NOTHING, 0)


def _refreshing(sitting: Sitting, cabinet: Cabinet) -> Course:
    """Caches that have grown too large, built anew."""
    before = cabinet.state.refreshes
    yield from cabinet.refreshing()
    if cabinet.state.refreshes > before:
        sitting.base = len(cabinet.state.log.exchanges)
        read = [held.next_position for held in cabinet.shelf.holdings()]
        sitting.spots.refresh(read, cabinet.length)


def _exchanges(said: Sequence[Said], skipped: int) -> Iterator[Exchange]:
    """What was said, as a chat has it."""
    for each in said:
        ids = (*each.prompt[skipped:], *each.answer)
        yield Exchange(each.turns[-1].text, each.text, ids)
        skipped = 0


def _fits(cabinet: Cabinet, job: Job) -> bool:
    """Whether a session's caches are of all that was said."""
    return len(cabinet.state.log.exchanges) == len(job.said)
