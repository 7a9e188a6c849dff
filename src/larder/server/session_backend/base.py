"""Contract of the session backends: how a session holds its caches during a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from larder.core.errors import LarderError, Refused
from larder.core.types import TokenIds
from larder.engine.sampler import TokenSampler
from larder.server.answer_text import AnswerText
from larder.server.serving_policy import ServingPolicy
from larder.server.session_state import SavedCache, SessionState
from larder.server.tiers.device import DeviceReservations, MemoryDemand
from larder.server.tiers.disk import SLOWER_THAN_RECOMPUTE
from larder.server.tiers.manager import TierManager
from larder.server.transcript import CompletedTurn
from larder.session.transcript.tokenizer_adapter import TokenizerAdapter

SHORT_TAIL_TOKENS = 128  # an end of a prompt that is shorter is left to a decode step

if TYPE_CHECKING:
    from larder.server.request_state import CacheLoad, RequestState

# Finds another session of the tenant whose cache has a prefix of the text.
FindPrefix = Callable[[SessionState, tuple[int, ...]], SessionState | None]


class WriteAwaited(LarderError):
    """Host memory that a write in progress will free."""


class SessionBackend(ABC):
    """Steps of a request on its session's caches. For the model's thread."""

    def __init__(
        self, tiers: TierManager, reservations: DeviceReservations, tokenizer: TokenizerAdapter
    ) -> None:
        self._tiers, self._reservations, self._tokenizer = tiers, reservations, tokenizer

    @abstractmethod
    def turn_demand(
        self, serving: ServingPolicy, turns: Sequence[CompletedTurn], length: int, new_tokens: int
    ) -> MemoryDemand:
        """Upper bound of the memory of a turn that starts from text alone.

        Args:
            turns: completed turns that the text begins with.
            length: tokens of the whole text once the prompt is read.
            new_tokens: the longest answer.
        """

    @abstractmethod
    def idle_demand(self, session: SessionState) -> MemoryDemand:
        """Upper bound of the device memory of an idle session."""

    @abstractmethod
    def start(self, state: RequestState) -> None:
        """Reserve the request's memory and prepare its cache.

        Raises:
            BudgetError: no memory is free now; the session is unchanged.
            WriteAwaited: host memory for a load is free soon; the session is unchanged.
        """

    @abstractmethod
    def on_loaded(self, state: RequestState) -> None:
        """Install a cache load that has ended, or fall back to prefill if it failed."""

    def abandon_load(self, state: RequestState) -> None:
        """Release the cache load of a request that was cancelled."""
        if state.prefill.load is not None:
            state.prefill.load.reservation.release()
            state.prefill.load = None

    @abstractmethod
    def prefill_block(self, state: RequestState) -> int:
        """Prefill one block; the approximate number of its tokens."""

    def companions(self, state: RequestState, others: Sequence[RequestState]) -> list[RequestState]:
        """Requests whose next blocks one pass may read with that of `state`; none by default.

        Args:
            others: in the order in which they would get a block.
        """
        return []

    def read_together(self, states: Sequence[RequestState]) -> None:
        """Read the next block of a request and of its companions in one pass.

        If it fails, nothing has changed. `finish_block` follows for each.
        """
        raise NotImplementedError  # a backend with companions has it

    def finish_block(self, state: RequestState) -> int:
        """Account for a block that was read with others; the number of its tokens."""
        raise NotImplementedError  # a backend with companions has it

    @abstractmethod
    def restart_prefill(self, state: RequestState) -> None:
        """Read everything again, generated tokens included: a failed step has
        corrupted the cache."""

    @abstractmethod
    def preempt(self, state: RequestState) -> None:
        """Release the memory of the request; `start` continues from its tokens so far."""

    @abstractmethod
    def abandon(self, state: RequestState) -> None:
        """Undo the changes of a preempted request that does not continue to its session."""

    @abstractmethod
    def step_tokens(self, state: RequestState) -> int:
        """Most generated tokens that a decode step may read with the result of a step for each."""

    def tail_tokens(self, state: RequestState) -> int:
        """Tokens from which on the end of a prompt is a block of its own."""
        return min(SHORT_TAIL_TOKENS, state.session.serving.block)

    def step_tail_tokens(self, state: RequestState) -> int:
        """Most tokens of several ends of prompts that one decode step reads in place of a block."""
        return self.tail_tokens(state)

    @abstractmethod
    def on_step(self, state: RequestState, plans: int) -> None:
        """Account for a decode step, which has read `RequestState.step_ids`.

        Args:
            plans: plans that the cache had executed before the step.

        Raises:
            BudgetError: the cache outgrows the budget.
        """

    @abstractmethod
    def needs_closing_pass(self, state: RequestState, reason: str, closing: TokenIds) -> bool:
        """True if the cache must read the end of the complete answer in one more step."""

    @abstractmethod
    def prepare_turn(self, state: RequestState, reason: str, closing: TokenIds) -> CompletedTurn:
        """Build the completed turn and the state after it, without committing them."""

    @abstractmethod
    def commit_turn(self, state: RequestState) -> None:
        """Adopt the state after the turn, which is stored."""

    @abstractmethod
    def rollback(self, state: RequestState) -> None:
        """Restore the session's caches to the state before the request, or drop them."""

    def _start_answer(self, state: RequestState) -> None:
        """Prepare the text and the randomness of the answer, unless they continue after a retry."""
        if state.answer.stream is None:
            decode, request = self._tokenizer.decode, state.request
            state.answer.stream = AnswerText(decode, request.stop, state.listener)
            vocabulary = state.session.serving.runtime.decoder.vocab_size
            # The ids of image tokens are none of the model's.
            prompt_ids = [token for token in state.resolved.prompt_ids if token < vocabulary]
            state.answer.sampler = TokenSampler(request.sampling, prompt_ids, state.matcher)

    def _count_cached(self, state: RequestState, cached: int) -> None:
        """Count the tokens that the cache has before the prefill."""
        counts = state.counts
        state.prefill.cached_len = counts.cached = cached
        counts.restored = cached if counts.tier in ("host", "disk") else 0

    def _await_write(
        self, state: RequestState, saved: SavedCache, origin: SessionState | None = None
    ) -> None:
        """Wait once for the host memory that the write of another cache holds.

        Args:
            origin: session that the request's was forked from, whose prefix is tried again.

        Raises:
            WriteAwaited: that write is worth waiting for.
        """
        write = self._tiers.awaitable_write(state.session, saved)
        if write is None or state.awaited_write not in (None, write):
            return
        state.awaited_write = write
        self._tiers.leave_next_write()
        self._tiers.drop(state.session)  # what was reserved
        state.session.residency.origin = origin or state.session.residency.origin
        raise WriteAwaited("Host memory is held by a write, which is waited for.")

    def _resume_writes(self, state: RequestState) -> None:
        """Start the next write, which a request that has waited was let before."""
        if state.awaited_write is not None:
            self._tiers.write_next()

    def _note_failed_load(self, load: CacheLoad, error: BaseException) -> None:
        """Drop the record of a stored cache that cannot be loaded; of one that is slow it stays."""
        if not isinstance(error, Refused) or error.reason != SLOWER_THAN_RECOMPUTE:
            load.source.residency.saved_cache = None
