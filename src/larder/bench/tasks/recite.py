"""Recitals: numbered reminders scattered in small talk, to be recited in order, item by item.

No paper: long generation that stays checkable, each item of which needs one place of the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from larder.bench.luck import first_that_holds
from larder.bench.recite import recite_conversation
from larder.bench.sources import Sources
from larder.bench.task import Style, Task
from larder.core.conversation import Conversation
from larder.core.errors import BadParameter


@dataclass(frozen=True)
class Recite(Task):
    """Reminders to recite.

    Args:
        items: the most that one question asks for.
    """

    style: ClassVar[Style] = Style.RECITAL
    items: int = 60

    def __post_init__(self) -> None:
        if self.items < 1:
            raise BadParameter(f"recite.items must be 1 or more, got {self.items}.")

    def make(self, seed: int, tokens: int, sources: Sources) -> Conversation:
        def made(own: int) -> Conversation:
            return recite_conversation(own, tokens, sources.count_tokens, self.items)

        return first_that_holds("recite", seed, tokens, made)


Part = Recite
