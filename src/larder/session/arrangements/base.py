"""Interface of arrangements: how a conversation is divided among caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from larder.core.conversation import Conversation
from larder.session.routing import Router

if TYPE_CHECKING:  # episodes load one
    from larder.session.embedders.base import Embedder


class Arrangement(ABC):
    """First slot of a policy: one cache for all, or one per episode. A frozen dataclass."""

    def embedders(self) -> tuple[str, ...]:
        """Names of the embedders that `build_router` loads; none by default."""
        return ()

    @abstractmethod
    def build_router(
        self,
        conversation: Conversation,
        embedder: Callable[[str], Embedder],
        count: Callable[[str], int],
        turn_texts: Sequence[str] = (),
    ) -> Router:
        """Build the router from questions to caches.

        Args:
            embedder: loads an embedder by name.
            count: number of tokens of a text.
            turn_texts: later turns of a chat, one segment each.
        """

    @abstractmethod
    def restore_router(
        self, record: Mapping[str, Any], embedder: Callable[[str], Embedder]
    ) -> Router:
        """Restore a router from `Router.to_record`, without clustering.

        Raises:
            KeyError, TypeError, ValueError: the record is not one of this arrangement.
        """
