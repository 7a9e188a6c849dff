"""How sessions are held: what a request goes through from its start to its end, or back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from larder.server.job import Job
    from larder.server.sitting import Said


class Manner(ABC):
    """What becomes of a request's session. For the model's thread."""

    @abstractmethod
    def start(self, job: Job) -> None:
        """Give a request its memory.

        Raises:
            BudgetError: there is none now; the session is as it was.
        """

    @abstractmethod
    def arrive(self, job: Job) -> None:
        """What was fetched for it is here, or is not to be had."""

    @abstractmethod
    def give_up(self, job: Job) -> None:
        """Nobody waits any more for what was fetched."""

    @abstractmethod
    def read(self, job: Job) -> int:
        """Read on by a block; how many tokens that was, roughly."""

    @abstractmethod
    def read_again(self, job: Job) -> None:
        """A pass has spoiled the cache: have all be read again, what was generated included."""

    @abstractmethod
    def note(self, job: Job, plans: int) -> None:
        """A pass has read what was unread.

        Args:
            plans: that were carried out in the cache before it.

        Raises:
            BudgetError: what is held outgrows the budget.
        """

    @abstractmethod
    def goes_on(self, job: Job, reason: str, closing: tuple[int, ...]) -> bool:
        """The answer is complete; whether the cache shall read the end of it in one more pass."""

    @abstractmethod
    def file(self, job: Job, reason: str, closing: tuple[int, ...]) -> Said:
        """Make ready to go over to the state behind the turn."""

    @abstractmethod
    def accept(self, job: Job) -> None:
        """Go over to it: the turn is kept."""

    @abstractmethod
    def undo(self, job: Job) -> None:
        """Have the session's caches be as before, or be none where they cannot."""
