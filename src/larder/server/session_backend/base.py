"""How sessions are held: what a request goes through from its start to its end, or back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from larder.server.request_state import RequestState
    from larder.server.session_state import CompletedTurn


class SessionBackend(ABC):
    """What becomes of a request's session. For the model's thread."""

    @abstractmethod
    def start(self, job: RequestState) -> None:
        """Give a request its memory.

        Raises:
            BudgetError: there is none now; the session is as it was.
        """

    @abstractmethod
    def on_loaded(self, job: RequestState) -> None:
        """What was fetched for it is here, or is not to be had."""

    @abstractmethod
    def give_up(self, job: RequestState) -> None:
        """Nobody waits any more for what was fetched."""

    @abstractmethod
    def read(self, job: RequestState) -> int:
        """Read on by a block; how many tokens that was, roughly."""

    @abstractmethod
    def restart_prefill(self, job: RequestState) -> None:
        """A pass has spoiled the cache: have all be read again, what was generated included."""

    @abstractmethod
    def note(self, job: RequestState, plans: int) -> None:
        """A pass has read what was unread.

        Args:
            plans: that were carried out in the cache before it.

        Raises:
            BudgetError: what is held outgrows the budget.
        """

    @abstractmethod
    def needs_closing_pass(self, job: RequestState, reason: str, closing: tuple[int, ...]) -> bool:
        """The answer is complete; whether the cache shall read the end of it in one more pass."""

    @abstractmethod
    def file(self, job: RequestState, reason: str, closing: tuple[int, ...]) -> CompletedTurn:
        """Make ready to go over to the state behind the turn."""

    @abstractmethod
    def accept(self, job: RequestState) -> None:
        """Go over to it: the turn is kept."""

    @abstractmethod
    def undo(self, job: RequestState) -> None:
        """Have the session's caches be as before, or be none where they cannot."""
