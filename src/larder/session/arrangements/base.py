"""What every arrangement can be asked: how many caches a conversation gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from larder.core.conversation import Conversation
from larder.session.embedders.base import Embedder
from larder.session.episodes.routing import Router


class Arrangement(ABC):
    """The first slot of a policy: one cache for all, or one per episode. A frozen dataclass."""

    def embedders(self) -> tuple[str, ...]:
        """The embedders that `arrange` asks for, by name; none by default."""
        return ()

    @abstractmethod
    def build_router(
        self,
        conversation: Conversation,
        embedder: Callable[[str], Embedder],
        count: Callable[[str], int],
        said: Sequence[str] = (),
    ) -> Router:
        """The way from a question to a cache.

        Args:
            embedder: loads an embedder by name.
            count: tokens of a text.
            said: what was said since the conversation, one segment per turn of a chat.
        """

    @abstractmethod
    def restore_router(
        self, told: Mapping[str, Any], embedder: Callable[[str], Embedder]
    ) -> Router:
        """The router that told this, without arranging anything.

        Raises:
            KeyError, TypeError, ValueError: no router of this arrangement has.
        """
