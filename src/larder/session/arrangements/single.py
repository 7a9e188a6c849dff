"""One cache answers every question.

No paper: what every method does that knows no episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from larder.core.conversation import Conversation
from larder.session.arrangements.base import Arrangement
from larder.session.embedders.base import Embedder
from larder.session.episodes.routing import Router, SingleCacheRouter


@dataclass(frozen=True)
class Single(Arrangement):
    """The whole conversation in one cache."""

    def build_router(
        self,
        conversation: Conversation,
        embedder: Callable[[str], Embedder],
        count: Callable[[str], int],
        said: Sequence[str] = (),
    ) -> Router:
        del conversation, embedder, count, said
        return SingleCacheRouter()

    def restore_router(
        self, told: Mapping[str, Any], embedder: Callable[[str], Embedder]
    ) -> Router:
        del embedder
        if told:
            raise ValueError("a single cache has no episodes")
        return SingleCacheRouter()


Part = Single
