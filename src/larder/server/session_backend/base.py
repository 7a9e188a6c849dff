"""Contract of the session backends: how a session holds its caches during a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from larder.server.request_state import RequestState
    from larder.server.session_state import CompletedTurn


class SessionBackend(ABC):
    """Steps of a request on its session's caches. For the model's thread."""

    @abstractmethod
    def start(self, job: RequestState) -> None:
        """Reserve the request's memory and prepare its cache.

        Raises:
            BudgetError: no memory is free now; the session is unchanged.
        """

    @abstractmethod
    def on_loaded(self, job: RequestState) -> None:
        """Install a cache load that has ended, or fall back to prefill if it failed."""

    @abstractmethod
    def abandon_load(self, job: RequestState) -> None:
        """Release the cache load of a request that was cancelled."""

    @abstractmethod
    def prefill_block(self, job: RequestState) -> int:
        """Prefill one block; the approximate number of its tokens."""

    @abstractmethod
    def restart_prefill(self, job: RequestState) -> None:
        """Read everything again, generated tokens included: a failed step has
        corrupted the cache."""

    @abstractmethod
    def on_step(self, job: RequestState, plans: int) -> None:
        """Account for a decode step, which has read `RequestState.step_ids`.

        Args:
            plans: plans that the cache had executed before the step.

        Raises:
            BudgetError: the cache outgrows the budget.
        """

    @abstractmethod
    def needs_closing_pass(self, job: RequestState, reason: str, closing: tuple[int, ...]) -> bool:
        """True if the cache must read the end of the complete answer in one more step."""

    @abstractmethod
    def prepare_turn(
        self, job: RequestState, reason: str, closing: tuple[int, ...]
    ) -> CompletedTurn:
        """Build the completed turn and the state after it, without committing them."""

    @abstractmethod
    def commit_turn(self, job: RequestState) -> None:
        """Adopt the state after the turn, which is stored."""

    @abstractmethod
    def rollback(self, job: RequestState) -> None:
        """Restore the session's caches to the state before the request, or drop them."""
