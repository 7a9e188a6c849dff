"""Chat backend: sessions under a budget or with episodes, with the caches and answers of `larder
chat`.

A turn takes the steps of `larder.session.chat_cache`, in portions of at most a block. Three things
differ from a chat. A message longer than M is accepted: all but its last block is prefilled as a
context is, on a copy of the cache. The end of a turn is read before the turn is assigned to an
episode. And episodes that have grown too large are rebuilt while no request is answered, or what
is left of that when the next turn begins.

A dropped cache is rebuilt from the transcript: prefill up to the last rebuild, then turn by turn,
token by token where the result depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from larder.core.errors import BudgetError, LarderError
from larder.core.types import TokenIds
from larder.server.admission import chat_turn_demand
from larder.server.request_state import CacheLoad, PrefillProgress, RequestState
from larder.server.serving_policy import ServingPolicy
from larder.server.session_backend.base import SessionBackend
from larder.server.session_backend.chat_prefill import ChatPrefill, IdleRefresher, PrefillSteps
from larder.server.session_backend.chat_snapshot import ChatCaches
from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.manager import TierManager
from larder.server.token_budget import PrefillTokenBudget
from larder.server.transcript import CompletedTurn, PositionMaps, num_tokens
from larder.session.chat_state import ActiveTurn
from larder.session.transcript.chat_log import ChatTurn
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter
from larder.store.ledger import Tier


class ChatBackend(SessionBackend):
    """Session backend with a `ChatCache` per session.

    Args:
        token_budget: counts the seconds of decode steps that interrupt blocks.
    """

    def __init__(
        self,
        tiers: TierManager,
        reservations: DeviceReservations,
        tokenizer: TokenizerAdapter,
        token_budget: PrefillTokenBudget,
    ) -> None:
        super().__init__(tiers, reservations, tokenizer)
        self._token_budget = token_budget
        self._prefill = ChatPrefill(tokenizer, tiers.disk)
        self.refresher = IdleRefresher(tiers, reservations, self._grant)

    def turn_demand(
        self, serving: ServingPolicy, turns: Sequence[CompletedTurn], length: int, new_tokens: int
    ) -> MemoryDemand:
        return chat_turn_demand(serving, length, length - num_tokens(turns), new_tokens, 0)

    def idle_demand(self, session: SessionState) -> MemoryDemand:
        return chat_turn_demand(session.serving, session.residency.occupancy.read, 0, 0, 1)

    def start(self, state: RequestState) -> None:
        resolved = state.resolved
        session, past_tokens = state.session, num_tokens(resolved.past_turns)
        residency = session.residency
        if not self._prefill.extends(state):
            self._tiers.drop(session)
        state.counts.tier, held, source = residency.tier, residency.chat_cache, self._source(state)
        episodes = 0 if held is None else len(held.caches)
        if source is not None and source.residency.saved_cache is not None:
            episodes = max(episodes, source.residency.saved_cache.caches)
        length = len(resolved.prompt_ids)
        state.prefill.new_ids = (
            resolved.prompt_ids[past_tokens:]
            if resolved.past_turns
            else resolved.prompt_ids[self._prefill.opening_len(state) :]
        )
        self._grant(
            session,
            chat_turn_demand(
                session.serving, length, length - past_tokens, state.new_tokens, episodes
            ),
        )
        if held is None:
            state.counts.tier = self._copy_from_origin(state)
            if residency.chat_cache is None and source is not None and self._fetch(state, source):
                return
        self._tiers.restored["host"] += state.counts.tier == "host"
        self._plan_prefill(state)

    def _plan_prefill(self, state: RequestState) -> None:
        """Prepare the prefill: the caches are present, or are to be rebuilt."""
        resolved = state.resolved
        session, past_tokens = state.session, num_tokens(resolved.past_turns)
        if session.residency.chat_cache is not None:
            num_turns = len(session.residency.chat_cache.state.log.turns)
            self._count_cached(state, num_tokens(resolved.past_turns[:num_turns]))
        state.counts.recomputed = past_tokens - state.prefill.cached_len
        unread = len(resolved.prompt_ids) - state.prefill.cached_len
        state.prefill.estimated_blocks = unread // session.serving.block
        state.prefill.steps = self._prefill.steps(state)

    def prefill_block(self, state: RequestState) -> int:
        prefill = state.prefill
        assert prefill.steps is not None
        prefill.estimated_blocks -= 1
        started = perf_counter() - self._token_budget.interrupted_seconds
        try:
            next(prefill.steps)
            prefill.seconds += perf_counter() - self._token_budget.interrupted_seconds - started
        except StopIteration:
            prefill.steps = None
            self._start_answer(state)
        self._check(state)
        return state.session.serving.block

    def restart_prefill(self, state: RequestState) -> None:
        answer = state.answer
        answer.active_turn = answer.completed_turn = answer.turn_commit = None
        state.prefill.steps = self._prefill.steps(state)

    def preempt(self, state: RequestState) -> None:
        """Undo the turn, which is replayed later with the tokens generated so far."""
        self.rollback(state)
        state.prefill = PrefillProgress()

    def abandon(self, state: RequestState) -> None:
        """No effect: `preempt` has undone the turn."""

    def step_tokens(self, state: RequestState) -> int:
        assert state.answer.active_turn is not None
        return state.answer.active_turn.reader.step_tokens

    def on_step(self, state: RequestState, plans: int) -> None:
        answer = state.answer
        del plans
        self._check(state)
        assert answer.active_turn is not None
        if not answer.finish_reason and answer.active_turn.reader.free_tokens < 1:
            state.prefill.steps = answer.active_turn.reader.end_block_steps(1)

    def needs_closing_pass(self, state: RequestState, reason: str, closing: TokenIds) -> bool:
        prefill, answer, active_turn = state.prefill, state.answer, state.answer.active_turn
        assert active_turn is not None
        ids, prefill.steps = (*prefill.new_ids, *answer.output_ids, *closing), None
        answer.closing_ids = ids[active_turn.cache.next_position - active_turn.start_position :]
        answer.finish_reason = reason
        if active_turn.reader.is_within_after(len(answer.closing_ids)):
            return bool(answer.closing_ids)
        prefill.steps = self._closing_steps(state, active_turn, closing)
        return True

    def prepare_turn(self, state: RequestState, reason: str, closing: TokenIds) -> CompletedTurn:
        answer, chat_cache = state.answer, state.session.residency.chat_cache
        if answer.completed_turn is None:
            assert chat_cache is not None and answer.active_turn is not None
            unread, ids = len(answer.closing_ids), state.prefill.new_ids
            turn = answer.completed_turn = state.complete_turn(closing, unread, reason)
            question = state.resolved.new_messages[-1].text
            chat_turn = ChatTurn(question, turn.text, (*ids, *turn.answer_ids))
            answer.turn_commit = chat_cache.prepare_commit(answer.active_turn, chat_turn)
        return answer.completed_turn

    def _closing_steps(
        self, state: RequestState, active_turn: ActiveTurn, closing: TokenIds
    ) -> PrefillSteps:
        """Read the end of a turn, and bring the cache that holds it back to its budget."""
        answer = state.answer
        yield from active_turn.reader.closing_steps(answer.closing_ids, len(answer.output_ids))
        self.prepare_turn(state, answer.finish_reason, closing)
        assert answer.turn_commit is not None
        if answer.turn_commit.number == active_turn.number:
            yield from active_turn.reader.end_turn_steps()

    def commit_turn(self, state: RequestState) -> None:
        session, active_turn, commit = (
            state.session,
            state.answer.active_turn,
            state.answer.turn_commit,
        )
        residency = session.residency
        chat_cache = residency.chat_cache
        assert chat_cache is not None and active_turn is not None and commit is not None
        start = chat_cache.num_tokens
        chat_cache.commit(active_turn, commit)
        residency.position_maps.file(
            active_turn.number, commit.number, active_turn.start_position, start
        )
        active_turn.cache.compact()
        state.answer.active_turn, residency.episode = None, active_turn.number
        residency.cached_ids = session.transcript.ids
        session.update_occupancy()
        self.refresher.note(session)

    def rollback(self, state: RequestState) -> None:
        prefill = state.prefill
        session, active_turn = state.session, state.answer.active_turn
        residency = session.residency
        if prefill.steps is not None:
            prefill.steps.close()
        if residency.resident_caches is not None:
            residency.resident_caches.stop_rebuild()
        prefill.steps = state.answer.active_turn = None
        if active_turn is not None and residency.chat_cache is not None:
            if active_turn.can_be_undone:
                residency.chat_cache.abort_turn(active_turn)
            else:
                self._tiers.drop(session)
        # Incomplete caches: the turn was not stored, or the replay has not ended.
        if residency.contains(len(state.resolved.past_turns)):
            self._tiers.shrink_to_fit(session)
        else:
            self._tiers.drop(session)

    def on_loaded(self, state: RequestState) -> None:
        """Install the loaded caches, or rebuild them if the load failed."""
        load, state.prefill.load = state.prefill.load, None
        assert load is not None
        session, error = state.session, load.future.exception()
        if error is None:
            try:
                self._tiers.restore_from_disk(
                    session, load.source, load.saved_cache, load.future.result(), load.reservation
                )
            except LarderError as rejected:  # counted by the tier manager
                error = rejected
            except BaseException:  # the rollback releases the session's reservation only
                self._tiers.chats.return_reservation(session, load.reservation)
                raise
        if error is not None:
            self._tiers.chats.return_reservation(session, load.reservation)
            state.counts.tier = "none"
            self._note_failed_load(load, error)
        session.residency.origin = None
        self._plan_prefill(state)

    def _grant(self, session: SessionState, demand: MemoryDemand) -> None:
        before = session.residency.reserved_bytes
        self._tiers.chats.reserve(session, max(before, demand.host))
        try:
            self._tiers.grant(session, demand)
        except BudgetError:
            self._tiers.chats.shrink(session, before)
            raise

    def _source(self, state: RequestState) -> SessionState | None:
        """Session whose stored caches this one can use: its own, or those of the session it was
        forked from."""
        session, past_tokens = state.session, num_tokens(state.resolved.past_turns)
        for each in (session, session.residency.origin):
            saved = None if each is None else each.residency.saved_cache
            if each is not None and saved is not None and each.serving is session.serving:
                if saved.tokens <= past_tokens:
                    return each
        return None

    def _fetch(self, state: RequestState, source: SessionState) -> bool:
        """Start a cache load; False if there is no host memory for it."""
        kept = source.residency.saved_cache
        assert kept is not None
        started = self._tiers.take_started(source, kept)
        reservation = self._tiers.chats.detach(state.session, kept.load_bytes)
        if reservation is None:
            origin = source if source is not state.session else None
            self._await_write(state, kept, origin)
            return False
        self._resume_writes(state)
        future = started or self._tiers.disk.load(source, kept)
        state.counts.tier = Tier.DISK.value
        state.prefill.load = CacheLoad(source, kept, kept.tokens, reservation, future)
        return True

    def _copy_from_origin(self, state: RequestState) -> str:
        """Copy the caches of the session it was forked from, if they match;
        the tier of the result."""
        session, origin = state.session, state.session.residency.origin
        residency = session.residency
        residency.origin = None
        if origin is None or origin.residency.chat_cache is None or origin.usage.is_running:
            return "none"
        if origin.serving is not session.serving:
            return "none"
        copied = origin.residency.chat_cache.copy_before(len(state.resolved.past_turns))
        residency.resident_caches = None if copied is None else ChatCaches(copied)
        if copied is not None:
            residency.cached_ids = session.transcript.ids
            residency.is_coded = origin.residency.is_coded
            residency.note_source(origin)
        residency.episode = origin.residency.episode
        residency.rebuilt_turns = min(
            origin.residency.rebuilt_turns, len(state.resolved.past_turns)
        )
        residency.chat_occupancy = origin.residency.chat_occupancy
        residency.position_maps = PositionMaps(dict(origin.residency.position_maps.maps))
        return residency.tier

    def _check(self, state: RequestState) -> None:
        """Compare the bytes in use with the reservations."""
        session, active_turn = state.session, state.answer.active_turn
        residency = session.residency
        device, host = residency.device_bytes, residency.host_bytes
        copy = None if active_turn is None else active_turn.copy
        if copy is not None:
            own, device_own = (
                copy.nbytes - copy.shared_nbytes,
                copy.device_nbytes - copy.shared_device_nbytes,
            )
            device, host = device + device_own, host + own - device_own
        self._reservations.check(session.key, max(device, residency.rebuild_bytes))
        if host > residency.reserved_bytes:
            self._tiers.chats.reserve(session, host)
