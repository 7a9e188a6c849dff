"""One cache answers every question.

No paper: what every method does that knows no episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from larder.core.conversation import Conversation
from larder.session.arrangements.base import Arrangement
from larder.session.embedders.base import Embedder
from larder.session.routing import OneCache, Router


@dataclass(frozen=True)
class Single(Arrangement):
    """The whole conversation in one cache."""

    def arrange(
        self,
        conversation: Conversation,
        embedder: Callable[[str], Embedder],
        count: Callable[[str], int],
        said: Sequence[str] = (),
    ) -> Router:
        del conversation, embedder, count, said
        return OneCache()


Part = Single
