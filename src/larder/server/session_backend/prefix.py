"""Prefix backend: one lossless cache per session, with prefix reuse between sessions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from larder.cache.prefix_forks import seal
from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError
from larder.core.types import TokenIds
from larder.prefill.turn_reader import REPLAYED_TOKENS
from larder.server.context_prompts import ContextPrompts
from larder.server.image_prompts import ImagePromptEncoder
from larder.server.request_state import CacheLoad, PrefillProgress, RequestState
from larder.server.resident_caches import PrefixCaches
from larder.server.serving_policy import CacheOccupancy, ServingPolicy
from larder.server.session_backend.base import FindPrefix, SessionBackend
from larder.server.session_backend.prefix_prefill import ContextReader, PrefixPrefill
from larder.server.session_state import SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.manager import TierManager
from larder.server.tiers.shared_prefixes import copied_prefix
from larder.server.token_budget import PrefillTokenBudget
from larder.server.transcript import TOKEN_TYPECODE, CompletedTurn, common_prefix_len, num_tokens
from larder.session.caches import SessionCaches


class PrefixBackend(SessionBackend):
    """Session backend that truncates or shares the cache with the longest common prefix, then
    prefills the rest.

    Args:
        images: encoder of prompts with images.
        find: finds another session with a common prefix.
        contexts: chunks of the contexts of requests.
        token_budget: tokens of a prompt between two decode steps beside answers.
        chunk_tokens: most tokens of a prompt that are read between two decode steps; None for a
            block of the policy.
    """

    def __init__(
        self,
        tiers: TierManager,
        reservations: DeviceReservations,
        images: ImagePromptEncoder,
        find: FindPrefix,
        contexts: ContextPrompts,
        token_budget: PrefillTokenBudget,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__(tiers, reservations, images.tokenizer)
        self._find, self._images = find, images
        self._prefill = PrefixPrefill(images, tiers.disk, token_budget, chunk_tokens)
        self._contexts = ContextReader(contexts)

    def turn_demand(
        self, serving: ServingPolicy, turns: Sequence[CompletedTurn], length: int, new_tokens: int
    ) -> MemoryDemand:
        return serving.lossless_turn_demand(CacheOccupancy(), length, new_tokens)

    def idle_demand(self, session: SessionState) -> MemoryDemand:
        occupancy = session.residency.occupancy
        return session.serving.lossless_turn_demand(occupancy, occupancy.read, 0)

    def start(self, state: RequestState) -> None:
        session = state.session
        if state.contexts is not None:
            self._start_contexts(state)
            return
        residency = session.residency
        if not state.num_preemptions:
            state.counts.tier = residency.tier
        usable = state.usable_tokens(session)
        if not usable and residency.is_resident:
            self._tiers.drop(session)
            usable = state.usable_tokens(session)  # the store may have an earlier state
        if not usable:
            self._start_over(state)
        elif residency.is_resident:
            self._continue(state, usable)
        elif not self._fetch(state, session, usable):
            self._start_over(state)
        if state.prefill.load is None:
            self._plan_prefill(state)

    def _start_contexts(self, state: RequestState) -> None:
        """Start with an empty cache, into which contexts are read apart."""
        session = state.session
        demand = self._demand(state, None)
        beside = self._contexts.workspace_nbytes(state)
        self._tiers.grant(session, replace(demand, transient_bytes=demand.transient_bytes + beside))
        self._reset(session)
        self._contexts.begin(state)

    def on_loaded(self, state: RequestState) -> None:
        """Install the loaded cache, or start with an empty one if the load failed."""
        load, state.prefill.load = state.prefill.load, None
        assert load is not None
        session, error = state.session, load.future.exception()
        if error is not None:
            load.reservation.release()
            self._note_failed_load(load, error)
            self._reset(session)
        else:
            self._install(session, load)
            self._truncate(session, load.usable_tokens)
            session.residency.origin = None
            session.update_occupancy()
        self._plan_prefill(state)

    def _install(self, session: SessionState, load: CacheLoad) -> None:
        try:
            self._tiers.restore_from_disk(
                session, load.source, load.saved_cache, load.future.result(), load.reservation
            )
        except BaseException:
            if session.residency.reservation is not load.reservation:  # the session's own
                load.reservation.release()
            raise

    def _plan_prefill(self, state: RequestState) -> None:
        """Count cached tokens and split the rest into blocks: the cache is present."""
        cache, turns = state.session.residency.active, state.resolved.past_turns
        assert cache is not None
        past_tokens = num_tokens(turns) - sum(each.unread_tokens for each in turns[-1:])
        if state.num_preemptions:
            state.prefill.cached_len = min(state.counts.cached, cache.next_position)
        else:
            self._count_cached(state, cache.next_position)
            state.counts.recomputed = max(0, past_tokens - state.prefill.cached_len)
        self._split_prefill(state)

    def prefill_block(self, state: RequestState) -> int:
        if state.prefill.steps is None:
            return self._count_block(state, self._prefill.read_block(state))
        count = self._contexts.read_block(state)
        if state.prefill.is_done:
            self._prepare(state)
        return count

    def companions(self, state: RequestState, others: Sequence[RequestState]) -> list[RequestState]:
        return self._prefill.companions(state, others)

    def read_together(self, states: Sequence[RequestState]) -> None:
        self._prefill.read_together(states)

    def finish_block(self, state: RequestState) -> int:
        return self._count_block(state, state.cache.nbytes)

    def _count_block(self, state: RequestState, held_bytes: int) -> int:
        """Account for the next block, which the cache has read; the number of its tokens."""
        session, block = state.session, state.prefill.block
        session.residency.cached_ids.extend(block)
        self._reservations.check(session.key, held_bytes)
        state.prefill.next_block += 1
        if state.prefill.is_done:
            self._prepare(state)
        return len(block)

    def restart_prefill(self, state: RequestState) -> None:
        session, residency = state.session, state.session.residency
        residency.resident_caches = self._caches(session, session.serving.empty_cache())
        residency.cached_ids = array(TOKEN_TYPECODE)
        residency.settled_tokens = 0
        self._tiers.shares.note(session)
        state.prefill.cached_len, state.prefill.steps = 0, None
        self._split_prefill(state)

    def preempt(self, state: RequestState) -> None:
        """Leave the cache to the session, with what it has read of the prompt and the answer."""
        session = state.session
        state.prefill = PrefillProgress(cached_len=state.prefill.cached_len)
        session.update_occupancy()
        self._tiers.shrink_to_fit(session)

    def abandon(self, state: RequestState) -> None:
        if len(state.session.residency.cached_ids) > self._own_len(state):
            self.rollback(state)

    def tail_tokens(self, state: RequestState) -> int:
        return min(super().tail_tokens(state), self._prefill.limit(state))

    def step_tail_tokens(self, state: RequestState) -> int:
        return self._prefill.limit(state)

    def step_tokens(self, state: RequestState) -> int:
        return min(self._prefill.block(state.session), REPLAYED_TOKENS)

    def on_step(self, state: RequestState, plans: int) -> None:
        session = state.session
        self._reservations.check(session.key, state.cache.nbytes)
        session.residency.cached_ids.extend(state.step_ids)
        if state.cache.plans != plans:
            session.residency.settled_tokens = state.cache.next_position

    def needs_closing_pass(self, state: RequestState, reason: str, closing: TokenIds) -> bool:
        """False: the next turn reads the end of this one with its prompt."""
        return False

    def prepare_turn(self, state: RequestState, reason: str, closing: TokenIds) -> CompletedTurn:
        session, read = state.session, state.cache.next_position
        unread = len(state.resolved.prompt_ids) + len(state.answer.output_ids) + len(closing) - read
        session.residency.cached_ids = array(
            TOKEN_TYPECODE, (*state.resolved.prompt_ids, *state.answer.output_ids)[:read]
        )
        session.update_occupancy()
        return state.complete_turn(closing, unread, reason)

    def commit_turn(self, state: RequestState) -> None:
        """No effect: the cache contains the turn already."""

    def rollback(self, state: RequestState) -> None:
        session, cache = state.session, state.session.residency.active
        residency = session.residency
        mark = self._own_len(state)
        can_undo = session.serving.can_truncate and cache is not None and mark > 0
        can_undo = can_undo and self._tiers.shares.can_truncate(session, mark)
        if cache is None or not can_undo or mark < residency.settled_tokens:
            self._tiers.drop(session)
            return
        self._tiers.shares.truncate(session, mark)
        residency.cached_ids = residency.cached_ids[:mark]
        session.update_occupancy()
        self._tiers.shrink_to_fit(session)

    def _own_len(self, state: RequestState) -> int:
        """Tokens of the session's own text that its cache had when the request started; a copy of
        another session's cache may have had some of the prompt, too."""
        session = state.session
        cached = session.residency.cached_ids[: state.prefill.cached_len]
        return common_prefix_len(cached, session.transcript.ids)

    def _split_prefill(self, state: RequestState) -> None:
        self._prefill.split(state, state.known_ids)
        if state.prefill.is_done:
            self._prepare(state)

    def _prepare(self, state: RequestState) -> None:
        """Prepare decoding: the prompt is read."""
        state.prefill.image_part = None
        session, cache = state.session, state.session.residency.active
        assert cache is not None
        tail_len = max(1, len(state.prefill.prompt_tail))
        cache.reserve(tail_len - 1 + state.new_tokens - len(state.answer.output_ids))
        self._reservations.check(session.key, cache.nbytes)
        self._start_answer(state)

    def _continue(self, state: RequestState, usable: int) -> None:
        """Continue with the session's own cache."""
        session, shares = state.session, self._tiers.shares
        if not shares.can_truncate(session, usable):
            self._tiers.drop(session)
            self._start_over(state)
            return
        own = self._demand(state, session)
        diverging = shares.divergence_bytes(session, usable)
        self._tiers.grant(session, replace(own, bytes=own.bytes + diverging))
        if session.residency.active is None:
            self._tiers.restore_from_host(session)
        self._truncate(session, usable)
        seal(state.cache)

    def _truncate(self, session: SessionState, usable: int) -> None:
        """Truncate the cache to the common prefix."""
        residency = session.residency
        assert residency.active is not None
        if usable < residency.active.next_position:
            self._tiers.shares.truncate(session, usable)
            residency.cached_ids = residency.cached_ids[:usable]

    def _fetch(self, state: RequestState, source: SessionState, usable: int) -> bool:
        """Start a cache load; False if there is no host memory for it.

        Raises:
            BudgetError: no device memory is free now.
            WriteAwaited: host memory is free soon.
        """
        session, saved = state.session, source.residency.saved_cache
        assert saved is not None
        demands = self._demand(state, source), self._demand(state, None)
        self._tiers.grant(
            session,
            MemoryDemand(
                max(each.bytes for each in demands), max(each.transient_bytes for each in demands)
            ),
        )
        ahead = self._tiers.take_started(source, saved)
        reservation = self._tiers.reserve_host(session, saved.load_bytes)
        if reservation is None:
            self._await_write(state, saved)
            return False
        self._resume_writes(state)
        future = ahead or self._tiers.disk.load(source, saved)
        if not state.num_preemptions:
            state.counts.tier = source.residency.tier
        state.prefill.load = CacheLoad(source, saved, usable, reservation, future)
        return True

    def _reset(self, session: SessionState) -> None:
        """Start with an empty cache, in memory that is reserved."""
        residency = session.residency
        residency.origin = None
        residency.resident_caches = self._caches(session, session.serving.empty_cache())
        residency.cached_ids = array(TOKEN_TYPECODE)
        residency.settled_tokens = 0
        residency.is_coded, residency.is_lossless = False, True

    def _start_over(self, state: RequestState) -> None:
        """Start with the prefix of another session's cache, or with an empty one."""
        session = state.session
        source = None if state.request.prompt_logprobs else self._source(state)
        if source is not None:
            try:
                if not source.residency.is_resident:
                    if self._fetch(state, source, source.usable_prefix_len(state.known_ids)):
                        return
                elif self._share(state, source) or self._copy(state, source):
                    return
            except BudgetError:
                pass  # the whole copy may take more than the turn
        self._tiers.grant(session, self._demand(state, None))
        self._reset(session)

    def _share(self, state: RequestState, source: SessionState) -> bool:
        """Share the prefix of another session on the device; False if it has to be copied.

        Raises:
            BudgetError: no device memory is free for the rest.
        """
        session, shares = state.session, self._tiers.shares
        usable = source.usable_prefix_len(state.known_ids)
        shared = shares.shareable_bytes(source, usable)
        if not shared:
            return False
        demand = self._demand(state, None)
        alone = demand.bytes + shares.table_bytes(source) - shared
        with shares.staying(source):
            self._tiers.grant(session, replace(demand, bytes=alone))
        self._start_from(state, source, usable, shares.fork(source, session, usable))
        return True

    def _copy(self, state: RequestState, source: SessionState) -> bool:
        """Copy the prefix from another session; False if its cache is no longer in memory."""
        self._tiers.grant(state.session, self._demand(state, source))
        usable = source.usable_prefix_len(state.known_ids) if source.residency.is_resident else 0
        if usable:
            self._start_from(state, source, usable, copied_prefix(source, usable))
        return usable > 0

    def _start_from(
        self, state: RequestState, source: SessionState, usable: int, cache: SequenceCache
    ) -> None:
        """Start with a cache of the prefix of another session."""
        session, residency = state.session, state.session.residency
        if not state.num_preemptions:
            state.counts.tier = source.residency.tier
        residency.resident_caches = self._caches(session, cache)
        residency.cached_ids = source.residency.cached_ids[:usable]
        residency.settled_tokens = min(source.residency.settled_tokens, usable)
        residency.is_coded, residency.origin = source.residency.is_coded, None
        residency.note_source(source)
        session.update_occupancy()

    def _caches(self, session: SessionState, cache: SequenceCache) -> PrefixCaches:
        """A cache on the device, as the only one of a session."""
        spec = session.serving.runtime.decoder.spec
        return PrefixCaches(SessionCaches.of_active(spec, cache))

    def _source(self, state: RequestState) -> SessionState | None:
        """Session with the longest common prefix, the fork's origin or a shareable one."""
        session, origin = state.session, state.session.residency.origin
        is_usable = origin is not None and origin.serving is session.serving
        own_len = state.usable_tokens(origin) if origin is not None and is_usable else 0
        other = self._find(session, state.known_ids)
        if other is not None and state.usable_tokens(other) > own_len:
            return other
        return origin if own_len else None

    def _demand(self, state: RequestState, source: SessionState | None) -> MemoryDemand:
        """Memory demand of the turn over the cache of `source`."""
        occupancy = (
            state.session.residency.occupancy if source is None else source.residency.occupancy
        )
        demand = state.session.serving.lossless_turn_demand(
            occupancy, len(state.resolved.prompt_ids), state.new_tokens
        )
        embeddings = self._images.embedding_bytes(state.resolved.prompt_ids)
        demand = replace(demand, bytes=demand.bytes + embeddings)
        if source is None:
            return demand
        nbytes = source.residency.nbytes
        return replace(
            demand,
            bytes=max(demand.bytes, nbytes),
            transient_bytes=max(demand.transient_bytes, nbytes),
        )
