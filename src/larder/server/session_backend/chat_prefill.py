"""Prefill of a chat turn in steps of at most a block, from the session's caches to the prompt's
tail; and rebuild of caches that have grown too large, between two turns, while no request runs.

A turn that finds its episodes rebuilt has its first token sooner. The result is the same as if the
next turn began with the rebuild, which it does with what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from larder.core.errors import BudgetError
from larder.core.types import TokenIds
from larder.prefill.memory import PeakMemoryMeter
from larder.server.admission import chat_turn_demand
from larder.server.request_finisher import FAILURES
from larder.server.request_state import RequestState
from larder.server.session_backend.chat_snapshot import ChatCaches, opening_history, session_log
from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.disk import DiskTier
from larder.server.tiers.manager import TierManager
from larder.server.transcript import CompletedTurn, PositionMaps
from larder.session.capacity import budget_tokens
from larder.session.chat_cache import ChatCache
from larder.session.chat_state import ActiveTurn, ChatState
from larder.session.prefill import prefill_memory_steps
from larder.session.transcript.chat_log import ChatLog, ChatTurn
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

PrefillSteps = Generator[object, None, None]
END = object()


class ChatPrefill:
    """Builder of the prefill steps of chat turns. For the model's thread.

    Args:
        disk: receives measurements of prefill speed.
    """

    def __init__(self, tokenizer: TokenizerAdapter, disk: DiskTier) -> None:
        self._tokenizer, self._disk = tokenizer, disk

    def steps(self, state: RequestState) -> PrefillSteps:
        """Steps from the session's present caches to one that has read all but the prompt's end."""
        prefill = state.prefill
        answer = state.answer
        session = state.session
        residency = session.residency
        chat_cache = residency.chat_cache
        if chat_cache is None:
            chat_cache = yield from self._rebuild(state)
            residency.resident_caches = ChatCaches(chat_cache)
            if (
                state.counts.recomputed > session.serving.block
            ):  # short prefills are slower per token
                self._disk.note_reading(state.counts.recomputed, prefill.seconds)
        else:
            if not chat_cache.is_refreshing:
                chat_cache.refresh_meter = PeakMemoryMeter()
            yield from self._catch_up(state, chat_cache)
        residency.cached_ids = session.transcript.ids
        yield from refresh_steps(session, chat_cache)
        room = len(prefill.new_ids) + state.new_tokens + len(self._tokenizer.end_of_turn_ids())
        active_turn, prompt_tail = yield from self._open_turn(
            session, chat_cache, state.resolved.new_messages[-1].text, prefill.new_ids, room
        )
        answer.active_turn = active_turn
        prefill.prompt_tail = yield from active_turn.reader.message_steps(prompt_tail)
        if answer.output_ids:  # replay of generated tokens
            active_turn.reader.read_last_part(prefill.prompt_tail)
            yield from active_turn.reader.replay_steps(tuple(answer.output_ids[:-1]))

    def extends(self, state: RequestState) -> bool:
        """True if the caches, if there are any, contain a prefix of the completed turns, so that
        they can be extended."""
        chat_cache, past_turns = state.session.residency.chat_cache, state.resolved.past_turns
        if chat_cache is None or state.session.residency.contains(len(past_turns)):
            return True  # completed turns never change
        cached = chat_cache.state.log.turns
        return self._log(state).turns[: len(cached)] == cached

    def opening_len(self, state: RequestState) -> int:
        """Tokens of a first prompt that precede its question."""
        return opening_history(
            state.session.root,
            state.resolved.new_messages,
            state.resolved.prompt_ids,
            self._tokenizer,
        )[1]

    def _rebuild(self, state: RequestState) -> Generator[object, None, ChatCache]:
        """Rebuild the caches from the transcript."""
        session, runtime = state.session, state.session.serving.runtime
        log = self._log(state)
        before = replace(log, turns=log.turns[: session.residency.rebuilt_turns])
        session.residency.position_maps = PositionMaps()
        meter, source = PeakMemoryMeter(), before.prefill_input(before.transcript(self._tokenizer))
        memory = yield from prefill_memory_steps(runtime, source, session.serving.policy, {}, meter)
        chat_cache = ChatCache(runtime, ChatState(memory, before))
        chat_cache.refresh_meter = meter
        yield from self._catch_up(state, chat_cache)
        return chat_cache

    def _catch_up(self, state: RequestState, chat_cache: ChatCache) -> PrefillSteps:
        """Replay completed turns that the caches lack."""
        done = len(chat_cache.state.log.turns)
        if done == len(state.resolved.past_turns):
            return
        exchanges = self._log(state).turns
        for completed, exchange in list(zip(state.resolved.past_turns, exchanges, strict=True))[
            done:
        ]:
            yield from refresh_steps(state.session, chat_cache)
            yield from self._replay(state.session, chat_cache, completed, exchange)

    def _log(self, state: RequestState) -> ChatLog:
        """Log of the turns before the request."""
        resolved = state.resolved
        if resolved.past_turns:
            return session_log(state.session.root, resolved.past_turns, self._tokenizer)
        history, _ = opening_history(
            state.session.root, resolved.new_messages, resolved.prompt_ids, self._tokenizer
        )
        return ChatLog(history)

    def _replay(
        self,
        session: SessionState,
        chat_cache: ChatCache,
        completed: CompletedTurn,
        exchange: ChatTurn,
    ) -> PrefillSteps:
        """Replay of a completed turn over the caches, with the same steps as at first."""
        answer, closing = tuple(completed.answer_ids), self._tokenizer.end_of_turn_ids()
        prompt = exchange.ids[: len(exchange.ids) - len(answer)]
        active_turn, prompt_tail = yield from self._open_turn(
            session, chat_cache, exchange.question, prompt, len(exchange.ids)
        )
        turn, stop = active_turn.reader, len(answer) - completed.unread_tokens
        prompt_tail = yield from turn.message_steps(prompt_tail)
        turn.read_last_part(prompt_tail)
        yield
        yield from turn.replay_steps(answer[:stop])
        generated = len(answer) - (len(closing) if answer[-len(closing) :] == closing else 0)
        yield from turn.closing_steps(answer[stop:], generated)
        commit = chat_cache.prepare_commit(active_turn, exchange)
        session.residency.position_maps.file(
            active_turn.number, commit.number, active_turn.start_position, chat_cache.num_tokens
        )
        chat_cache.commit(active_turn, commit)
        active_turn.cache.compact()
        yield from chat_cache.enforce_budget_steps(active_turn, commit)
        yield

    def _open_turn(
        self,
        session: SessionState,
        chat_cache: ChatCache,
        question: str,
        prompt: TokenIds,
        room: int,
    ) -> Generator[object, None, tuple[ActiveTurn, tuple[int, ...]]]:
        """The cache for a question, and the rest of the prompt to read; a prompt longer than M is
        prefilled as a context is, except for its last block.

        Args:
            room: tokens of the whole turn.
        """
        active_turn, block = chat_cache.open_turn(question), session.serving.block
        if len(prompt) > budget_tokens(session.serving.policy):
            active_turn = yield from chat_cache.open_turn_prefilled(active_turn, prompt[:-block])
            prompt = prompt[-block:]
        active_turn.reader.reserve(room)
        return active_turn, prompt


def refresh_steps(session: SessionState, chat_cache: ChatCache) -> PrefillSteps:
    """Rebuild caches that have grown too large; goes on where an earlier call has stopped."""
    before = chat_cache.state.refreshes
    for counts in chat_cache.refresh_steps():
        before = _note_refresh(session, chat_cache, before)
        yield counts
    _note_refresh(session, chat_cache, before)


def _note_refresh(session: SessionState, chat_cache: ChatCache, before: int) -> int:
    """Note a refresh that has ended; the number of all so far.

    Args:
        before: number that was noted.
    """
    if chat_cache.state.refreshes > before:
        session.residency.rebuilt_turns = len(chat_cache.state.log.turns)
        read = [held.next_position for held in chat_cache.caches.usage()]
        session.residency.position_maps.refresh(read, chat_cache.num_tokens)
    return chat_cache.state.refreshes


class IdleRefresher:
    """Refreshes of idle sessions, a step at a time, in the order of their turns. For the model's
    thread.

    No cache leaves the device for one, and none of another tenant leaves host memory. A session
    whose caches leave memory meanwhile, or that is asked again, is left to its next turn.

    Args:
        grant: reserves the memory of a turn.
    """

    def __init__(
        self,
        tiers: TierManager,
        reservations: DeviceReservations,
        grant: Callable[[SessionState, MemoryDemand], None],
    ) -> None:
        self._tiers, self._reservations, self._grant = tiers, reservations, grant
        self._overdue: dict[int, SessionState] = {}

    def note(self, session: SessionState) -> None:
        """Note a session whose turn has ended, if its caches have grown too large."""
        chat_cache = session.residency.chat_cache
        if chat_cache is not None and chat_cache.is_overdue:
            self._overdue[session.key] = session

    def step(self) -> bool:
        """One step of a refresh; False if there was nothing to do."""
        for session in list(self._overdue.values()):
            if session.residency.is_saving:
                continue  # until the write has ended
            if self._goes_on(session):
                return True
            del self._overdue[session.key]
        return False

    def _goes_on(self, session: SessionState) -> bool:
        """One step of the refresh of a session; False if it has ended or is left to the next
        turn."""
        chat_cache = session.residency.chat_cache
        if chat_cache is None or not session.is_idle or session.key not in self._tiers.on_device:
            return False
        session.usage.is_running = True  # not a candidate for its own eviction
        try:
            return self._advance(session, chat_cache)
        except FAILURES:
            self._tiers.drop(session)  # the next turn reads it again
            return False
        finally:
            session.usage.is_running = False

    def _advance(self, session: SessionState, chat_cache: ChatCache) -> bool:
        """`_goes_on` of a session that can go on."""
        try:
            self._reserve(session)
        except BudgetError:
            chat_cache.stop_refresh()
            self._end(session)
            return False
        if next(refresh_steps(session, chat_cache), END) is END:
            self._end(session)
            return False
        residency = session.residency
        self._reservations.check(session.key, max(residency.device_bytes, residency.rebuild_bytes))
        return True

    def _reserve(self, session: SessionState) -> None:
        """Memory of a refresh.

        Raises:
            BudgetError: it is not free.
        """
        caches = session.residency.caches
        assert caches is not None
        read = len(session.transcript.ids)
        demand = chat_turn_demand(session.serving, read, 0, 0, len(caches))
        if self._reservations.missing_bytes(session.key, session.tenant, demand):
            raise BudgetError("The device has no room for a refresh.")
        with self._tiers.evicting_only(session.tenant):
            self._grant(session, demand)

    def _end(self, session: SessionState) -> None:
        """Bring the cache that answered last back to the device, and release the rest."""
        residency = session.residency
        held = residency.resident_caches
        assert held is not None
        residency.episode = min(residency.episode, len(held.caches) - 1)
        held.caches.activate(residency.episode)
        session.update_occupancy()
        self._tiers.shrink_to_fit(session)
