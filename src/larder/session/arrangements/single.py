"""Single cache for the whole conversation.

No paper: the arrangement of every method without episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from larder.core.conversation import Conversation
from larder.session.arrangements.base import Arrangement
from larder.session.routing import Router, SingleCacheRouter

if TYPE_CHECKING:  # episodes load one
    from larder.session.embedders.base import Embedder


@dataclass(frozen=True)
class Single(Arrangement):
    """Whole conversation in one cache."""

    def build_router(
        self,
        conversation: Conversation,
        embedder: Callable[[str], Embedder],
        count: Callable[[str], int],
        turn_texts: Sequence[str] = (),
    ) -> Router:
        return SingleCacheRouter()

    def restore_router(
        self, record: Mapping[str, Any], embedder: Callable[[str], Embedder]
    ) -> Router:
        if record:
            raise ValueError("a single cache has no episodes")
        return SingleCacheRouter()


Part = Single
