"""Prefix backend: one lossless cache per session, with prefix reuse between sessions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from larder.cache.prefix_forks import seal
from larder.cache.sequence import SequenceCache
from larder.core.errors import BudgetError
from larder.prefill.turn_reader import REPLAYED_TOKENS
from larder.server.context_prompts import ContextPrompts
from larder.server.image_prompts import ImagePromptEncoder
from larder.server.request_state import CacheLoad, PrefillProgress, RequestState
from larder.server.resident_caches import PrefixCaches
from larder.server.serving_policy import CacheOccupancy, ServingPolicy
from larder.server.session_backend.base import FindPrefix, SessionBackend
from larder.server.session_backend.context_reader import ContextReader
from larder.server.session_backend.prefix_prefill import PrefixPrefill
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

    def start(self, job: RequestState) -> None:
        session = job.session
        if job.contexts is not None:
            self._start_contexts(job)
            return
        residency = session.residency
        if not job.num_preemptions:
            job.counts.tier = residency.tier
        usable = job.usable_tokens(session)
        if not usable and residency.is_resident:
            self._tiers.drop(session)
            usable = job.usable_tokens(session)  # the store may have an earlier state
        if not usable:
            self._start_over(job)
        elif residency.is_resident:
            self._continue(job, usable)
        elif not self._fetch(job, session, usable):
            self._start_over(job)
        if job.prefill.load is None:
            self._plan_prefill(job)

    def _start_contexts(self, job: RequestState) -> None:
        """Start with an empty cache, into which contexts are read apart."""
        session = job.session
        demand = self._demand(job, None)
        beside = self._contexts.nbytes_beside(job)
        self._tiers.grant(session, replace(demand, transient_bytes=demand.transient_bytes + beside))
        self._reset(session)
        self._contexts.begin(job)

    def on_loaded(self, job: RequestState) -> None:
        """Install the loaded cache, or start with an empty one if the load failed."""
        load, job.prefill.load = job.prefill.load, None
        assert load is not None
        session, error = job.session, load.future.exception()
        if error is not None:
            load.reservation.release()
            self._note_failed_load(load, error)
            self._reset(session)
        else:
            self._install(session, load)
            self._truncate(session, load.usable_tokens)
            session.residency.origin = None
            session.update_occupancy()
        self._plan_prefill(job)

    def _install(self, session: SessionState, load: CacheLoad) -> None:
        try:
            self._tiers.restore_from_disk(
                session, load.source, load.saved_cache, load.future.result(), load.reservation
            )
        except BaseException:
            if session.residency.reservation is not load.reservation:  # the session's own
                load.reservation.release()
            raise

    def _plan_prefill(self, job: RequestState) -> None:
        """Count cached tokens and split the rest into blocks: the cache is present."""
        cache, turns = job.session.residency.active, job.resolved.past_turns
        assert cache is not None
        past_tokens = num_tokens(turns) - sum(each.unread_tokens for each in turns[-1:])
        if job.num_preemptions:
            job.prefill.cached_len = min(job.counts.cached, cache.next_position)
        else:
            self._count_cached(job, cache.next_position)
            job.counts.recomputed = max(0, past_tokens - job.prefill.cached_len)
        self._split_prefill(job)

    def prefill_block(self, job: RequestState) -> int:
        if job.prefill.steps is None:
            return self._count_block(job, self._prefill.read_block(job))
        count = self._contexts.read_block(job)
        if job.prefill.is_done:
            self._prepare(job)
        return count

    def companions(self, job: RequestState, others: Sequence[RequestState]) -> list[RequestState]:
        return self._prefill.companions(job, others)

    def read_together(self, jobs: Sequence[RequestState]) -> None:
        self._prefill.read_together(jobs)

    def finish_block(self, job: RequestState) -> int:
        return self._count_block(job, job.cache.nbytes)

    def _count_block(self, job: RequestState, held_bytes: int) -> int:
        """Account for the next block, which the cache has read; the number of its tokens."""
        session, block = job.session, job.prefill.block
        session.residency.cached_ids.extend(block)
        self._reservations.check(session.key, held_bytes)
        job.prefill.next_block += 1
        if job.prefill.is_done:
            self._prepare(job)
        return len(block)

    def restart_prefill(self, job: RequestState) -> None:
        session, residency = job.session, job.session.residency
        residency.resident_caches = self._caches(session, session.serving.empty_cache())
        residency.cached_ids = array(TOKEN_TYPECODE)
        residency.settled_tokens = 0
        self._tiers.shares.note(session)
        job.prefill.cached_len, job.prefill.steps = 0, None
        self._split_prefill(job)

    def preempt(self, job: RequestState) -> None:
        """Leave the cache to the session, with what it has read of the prompt and the answer."""
        session = job.session
        job.prefill = PrefillProgress(cached_len=job.prefill.cached_len)
        session.update_occupancy()
        self._tiers.shrink_to_fit(session)

    def abandon(self, job: RequestState) -> None:
        if len(job.session.residency.cached_ids) > self._own_len(job):
            self.rollback(job)

    def tail_tokens(self, job: RequestState) -> int:
        return min(super().tail_tokens(job), self._prefill.limit(job))

    def step_tail_tokens(self, job: RequestState) -> int:
        return self._prefill.limit(job)

    def step_tokens(self, job: RequestState) -> int:
        return min(self._prefill.block(job.session), REPLAYED_TOKENS)

    def on_step(self, job: RequestState, plans: int) -> None:
        session = job.session
        self._reservations.check(session.key, job.cache.nbytes)
        session.residency.cached_ids.extend(job.step_ids)
        if job.cache.plans != plans:
            session.residency.settled_tokens = job.cache.next_position

    def needs_closing_pass(self, job: RequestState, reason: str, closing: tuple[int, ...]) -> bool:
        """False: the next turn reads the end of this one with its prompt."""
        return False

    def prepare_turn(
        self, job: RequestState, reason: str, closing: tuple[int, ...]
    ) -> CompletedTurn:
        session, read = job.session, job.cache.next_position
        unread = len(job.resolved.prompt_ids) + len(job.answer.output_ids) + len(closing) - read
        session.residency.cached_ids = array(
            TOKEN_TYPECODE, (*job.resolved.prompt_ids, *job.answer.output_ids)[:read]
        )
        session.update_occupancy()
        return job.complete_turn(closing, unread, reason)

    def commit_turn(self, job: RequestState) -> None:
        """No effect: the cache contains the turn already."""

    def rollback(self, job: RequestState) -> None:
        session, cache = job.session, job.session.residency.active
        residency = session.residency
        mark = self._own_len(job)
        can_undo = session.serving.can_truncate and cache is not None and mark > 0
        can_undo = can_undo and self._tiers.shares.can_truncate(session, mark)
        if cache is None or not can_undo or mark < residency.settled_tokens:
            self._tiers.drop(session)
            return
        self._tiers.shares.truncate(session, mark)
        residency.cached_ids = residency.cached_ids[:mark]
        session.update_occupancy()
        self._tiers.shrink_to_fit(session)

    def _own_len(self, job: RequestState) -> int:
        """Tokens of the session's own text that its cache had when the request started; a copy of
        another session's cache may have had some of the prompt, too."""
        session = job.session
        cached = session.residency.cached_ids[: job.prefill.cached_len]
        return common_prefix_len(cached, session.transcript.ids)

    def _split_prefill(self, job: RequestState) -> None:
        self._prefill.split(job, job.known_ids)
        if job.prefill.is_done:
            self._prepare(job)

    def _prepare(self, job: RequestState) -> None:
        """Prepare decoding: the prompt is read."""
        job.prefill.image_part = None
        session, cache = job.session, job.session.residency.active
        assert cache is not None
        tail_len = max(1, len(job.prefill.prompt_tail))
        cache.reserve(tail_len - 1 + job.new_tokens - len(job.answer.output_ids))
        self._reservations.check(session.key, cache.nbytes)
        self._start_answer(job)

    def _continue(self, job: RequestState, usable: int) -> None:
        """Continue with the session's own cache."""
        session, shares = job.session, self._tiers.shares
        if not shares.can_truncate(session, usable):
            self._tiers.drop(session)
            self._start_over(job)
            return
        own = self._demand(job, session)
        diverging = shares.divergence_bytes(session, usable)
        self._tiers.grant(session, replace(own, bytes=own.bytes + diverging))
        if session.residency.active is None:
            self._tiers.restore_from_host(session)
        self._truncate(session, usable)
        seal(job.cache)

    def _truncate(self, session: SessionState, usable: int) -> None:
        """Truncate the cache to the common prefix."""
        residency = session.residency
        assert residency.active is not None
        if usable < residency.active.next_position:
            self._tiers.shares.truncate(session, usable)
            residency.cached_ids = residency.cached_ids[:usable]

    def _fetch(self, job: RequestState, source: SessionState, usable: int) -> bool:
        """Start a cache load; False if there is no host memory for it.

        Raises:
            BudgetError: no device memory is free now.
            WriteAwaited: host memory is free soon.
        """
        session, saved = job.session, source.residency.saved_cache
        assert saved is not None
        demands = self._demand(job, source), self._demand(job, None)
        self._tiers.grant(
            session,
            MemoryDemand(
                max(each.bytes for each in demands), max(each.transient_bytes for each in demands)
            ),
        )
        ahead = self._tiers.take_started(source, saved)
        reservation = self._tiers.host_room(session, saved.load_bytes)
        if reservation is None:
            self._await_write(job, saved)
            return False
        self._resume_writes(job)
        future = ahead or self._tiers.disk.load(source, saved)
        if not job.num_preemptions:
            job.counts.tier = source.residency.tier
        job.prefill.load = CacheLoad(source, saved, usable, reservation, future)
        return True

    def _reset(self, session: SessionState) -> None:
        """Start with an empty cache, in memory that is reserved."""
        residency = session.residency
        residency.origin = None
        residency.resident_caches = self._caches(session, session.serving.empty_cache())
        residency.cached_ids = array(TOKEN_TYPECODE)
        residency.settled_tokens = 0
        residency.is_coded, residency.is_lossless = False, True

    def _start_over(self, job: RequestState) -> None:
        """Start with the prefix of another session's cache, or with an empty one."""
        session = job.session
        source = None if job.request.prompt_logprobs else self._source(job)
        if source is not None:
            try:
                if not source.residency.is_resident:
                    if self._fetch(job, source, source.usable_prefix_len(job.known_ids)):
                        return
                elif self._share(job, source) or self._copy(job, source):
                    return
            except BudgetError:
                pass  # the whole copy may take more than the turn
        self._tiers.grant(session, self._demand(job, None))
        self._reset(session)

    def _share(self, job: RequestState, source: SessionState) -> bool:
        """Share the prefix of another session on the device; False if it has to be copied.

        Raises:
            BudgetError: no device memory is free for the rest.
        """
        session, shares = job.session, self._tiers.shares
        usable = source.usable_prefix_len(job.known_ids)
        shared = shares.shareable_bytes(source, usable)
        if not shared:
            return False
        demand = self._demand(job, None)
        alone = demand.bytes + shares.table_bytes(source) - shared
        with shares.staying(source):
            self._tiers.grant(session, replace(demand, bytes=alone))
        self._start_from(job, source, usable, shares.fork(source, session, usable))
        return True

    def _copy(self, job: RequestState, source: SessionState) -> bool:
        """Copy the prefix from another session; False if its cache is no longer in memory."""
        self._tiers.grant(job.session, self._demand(job, source))
        usable = source.usable_prefix_len(job.known_ids) if source.residency.is_resident else 0
        if usable:
            self._start_from(job, source, usable, copied_prefix(source, usable))
        return usable > 0

    def _start_from(
        self, job: RequestState, source: SessionState, usable: int, cache: SequenceCache
    ) -> None:
        """Start with a cache of the prefix of another session."""
        session, residency = job.session, job.session.residency
        if not job.num_preemptions:
            job.counts.tier = source.residency.tier
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

    def _source(self, job: RequestState) -> SessionState | None:
        """Session with the longest common prefix, the fork's origin or a shareable one."""
        session, origin = job.session, job.session.residency.origin
        is_usable = origin is not None and origin.serving is session.serving
        own_len = job.usable_tokens(origin) if origin is not None and is_usable else 0
        other = self._find(session, job.known_ids)
        if other is not None and job.usable_tokens(other) > own_len:
            return other
        return origin if own_len else None

    def _demand(self, job: RequestState, source: SessionState | None) -> MemoryDemand:
        """Memory demand of the turn over the cache of `source`."""
        occupancy = (
            job.session.residency.occupancy if source is None else source.residency.occupancy
        )
        demand = job.session.serving.lossless_turn_demand(
            occupancy, len(job.resolved.prompt_ids), job.new_tokens
        )
        embeddings = self._images.embedding_bytes(job.resolved.prompt_ids)
        demand = replace(demand, bytes=demand.bytes + embeddings)
        if source is None:
            return demand
        nbytes = source.residency.nbytes
        return replace(
            demand,
            bytes=max(demand.bytes, nbytes),
            transient_bytes=max(demand.transient_bytes, nbytes),
        )
