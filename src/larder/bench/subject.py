"""What every subject of a study can be asked: read a conversation within a budget."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

from larder.bench.amounts import Matched
from larder.bench.workbench import Workbench
from larder.core.conversation import Conversation, Question
from larder.session.memory import Memory


class Scope(Enum):
    """What is read serves which questions.

    CONTEXT: all of them; nothing of them is known before.
    FIRST: all that share a context, but it is read with the first in mind.
    EACH: one; it is read anew for the next.
    """

    CONTEXT = "context"
    FIRST = "first"
    EACH = "each"


class Subject(ABC):
    """Something that reads a conversation within a budget.

    Args:
        name: what tables call it.
    """

    name: str

    @property
    @abstractmethod
    def spelling(self) -> str:
        """As it is written in full."""

    @property
    @abstractmethod
    def scope(self) -> Scope:
        """Which questions one reading is for."""

    def budgets(self, wanted: Sequence[str]) -> Sequence[str]:
        """Those of a study that it is run at."""
        return wanted

    def matched(self, wanted: Matched) -> Matched:
        """What is held equal; what a study says, where nothing is known that comes to the same."""
        return wanted

    @abstractmethod
    def read(
        self, bench: Workbench, conversation: Conversation, tokens: int | None, question: Question
    ) -> Memory:
        """Read under a budget in tokens per kv head; None where there is nothing to choose."""
