"""From what there is of a chat's caches to one that has read all of a prompt but its end.

A course is what such a turn takes in front of its answer, in steps that are no longer than a block.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from larder.prefill.memory import PeakMemoryMeter
from larder.server.request_state import RequestState
from larder.server.session_backend.chat_snapshot import opening_history, session_log
from larder.server.session_state import CompletedTurn, PositionMaps, SessionState
from larder.server.tiers.disk import DiskTier
from larder.session.capacity import budget_tokens
from larder.session.chat_cache import ChatCache
from larder.session.chat_state import ActiveTurn, ChatState
from larder.session.prefill import prefill_memory_steps
from larder.session.transcript.chat_log import ChatLog, ChatTurn
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

PrefillSteps = Generator[object, None, None]


class ChatPrefill:
    """Makes them. For the model's thread.

    Args:
        vault: told how long reading takes.
    """

    def __init__(self, scribe: TokenizerAdapter, vault: DiskTier) -> None:
        self._scribe, self._vault = scribe, vault

    def course(self, job: RequestState) -> PrefillSteps:
        """From what there is of a session to a cache that has read all but the prompt's end."""
        sitting = job.sitting
        if sitting.chat_cache is None:
            sitting.chat_cache = yield from self._rebuilt(job)
            if job.counts.recomputed > sitting.rule.block:  # fewer take longer, each
                self._vault.note_reading(job.counts.recomputed, job.seconds)
        else:
            sitting.chat_cache.refresh_meter = PeakMemoryMeter()
            yield from self._caught_up(job, sitting.chat_cache)
        sitting.read = sitting.ids
        yield from _refresh_steps(sitting, sitting.chat_cache)
        room = len(job.new_ids) + job.new_tokens + len(self._scribe.closing())
        told = sitting, sitting.chat_cache, job.turns[-1].text, job.new_ids, room
        drawer, asked = yield from self._drawn(*told)
        job.active_turn = drawer
        job.asked = yield from drawer.turn.message_steps(asked)
        if job.ids:  # they were said before, and are read once more
            drawer.turn.read_last_part(job.asked)
            yield from drawer.turn.replay_steps(tuple(job.ids[:-1]))

    def leads_on(self, job: RequestState, cabinet: ChatCache) -> bool:
        """Whether caches are of a beginning of what was said, so that they can hear the rest."""
        heard = cabinet.state.log.exchanges
        if len(heard) == len(job.said):  # what was said in a session is never changed
            return True
        return self._log(job).exchanges[: len(heard)] == heard

    def skipped(self, job: RequestState) -> int:
        """Tokens of a first prompt that are read before the question."""
        return opening_history(job.sitting.root, job.turns, job.wanted, self._scribe)[1]

    def _rebuilt(self, job: RequestState) -> Generator[object, None, ChatCache]:
        """Everything that was said, read anew."""
        sitting, desk = job.sitting, job.sitting.rule.desk
        log = self._log(job)
        before = replace(log, exchanges=log.exchanges[: sitting.base])
        sitting.spots = PositionMaps()
        meter, source = PeakMemoryMeter(), before.source(before.transcript(self._scribe))
        memory = yield from prefill_memory_steps(desk, source, sitting.rule.policy, {}, meter)
        cabinet = ChatCache(desk, ChatState(memory, before))
        cabinet.refresh_meter = meter
        yield from self._caught_up(job, cabinet)
        return cabinet

    def _caught_up(self, job: RequestState, cabinet: ChatCache) -> PrefillSteps:
        """Turns that the caches have not heard, as they were when they were said."""
        done = len(cabinet.state.log.exchanges)
        if done == len(job.said):
            return
        exchanges = self._log(job).exchanges
        for said, exchange in list(zip(job.said, exchanges, strict=True))[done:]:
            yield from _refresh_steps(job.sitting, cabinet)
            yield from self._heard(job.sitting, cabinet, said, exchange)

    def _log(self, job: RequestState) -> ChatLog:
        """What was said before the turn."""
        if job.said:
            return session_log(job.sitting.root, job.said, self._scribe)
        told = job.turns, job.wanted, self._scribe
        return ChatLog(opening_history(job.sitting.root, *told)[0])

    def _heard(
        self, sitting: SessionState, cabinet: ChatCache, said: CompletedTurn, exchange: ChatTurn
    ) -> PrefillSteps:
        """A turn once more, as it was when it was said."""
        answer, closing = tuple(said.answer), self._scribe.closing()
        prompt = exchange.ids[: len(exchange.ids) - len(answer)]
        told = sitting, cabinet, exchange.question, prompt, len(exchange.ids)
        drawer, asked = yield from self._drawn(*told)
        turn, stop = drawer.turn, len(answer) - said.unread
        asked = yield from turn.message_steps(asked)
        turn.read_last_part(asked)
        yield
        yield from turn.replay_steps(answer[:stop])
        generated = len(answer) - (len(closing) if answer[-len(closing) :] == closing else 0)
        yield from turn.closing_steps(answer[stop:], generated)
        filed = cabinet.file(drawer, exchange)
        sitting.spots.file(drawer.number, filed.number, drawer.mark, cabinet.length)
        cabinet.accept(drawer, filed)
        drawer.cache.compact()
        yield from cabinet.settling(drawer, filed)
        yield

    def _drawn(
        self,
        sitting: SessionState,
        cabinet: ChatCache,
        question: str,
        prompt: tuple[int, ...],
        room: int,
    ) -> Generator[object, None, tuple[ActiveTurn, tuple[int, ...]]]:
        """The cache for a question, and what it is yet to read of the prompt: a message longer than
        M is read as a context is, but for its last block.

        Args:
            room: tokens of the whole turn.
        """
        drawer, block = cabinet.draw(question), sitting.rule.block
        if len(prompt) > budget_tokens(sitting.rule.policy):
            drawer = yield from cabinet.ahead(drawer, prompt[:-block])
            prompt = prompt[-block:]
        drawer.turn.reserve(room)
        return drawer, prompt


def _refresh_steps(sitting: SessionState, cabinet: ChatCache) -> PrefillSteps:
    """Caches that have grown too large, built anew."""
    before = cabinet.state.refreshes
    yield from cabinet.refresh_steps()
    if cabinet.state.refreshes > before:
        sitting.base = len(cabinet.state.log.exchanges)
        read = [held.next_position for held in cabinet.caches.holdings()]
        sitting.spots.refresh(read, cabinet.length)
