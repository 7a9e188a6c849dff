"""Interface of routers, which assign questions and finished turns to caches; the single cache.

Routers are immutable: assigning a turn or forming episodes again returns another router, so that a
chat changes its state in a single assignment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class EpisodeMatch:
    """Matched episode, and its similarity by the rule."""

    episode: int
    similarity: float


@dataclass(frozen=True)
class TurnAssignment:
    """Assignment of a finished turn to a cache.

    Args:
        router: router with the turn.
        number: cache that holds the turn; another one than answered if the topic is new.
    """

    router: Router
    number: int


@dataclass(frozen=True)
class EpisodeRefresh:
    """Result of a refresh.

    Args:
        router: router with new centroids and prompts.
        rebuilt: numbers of the caches to rebuild.
    """

    router: Router
    rebuilt: tuple[int, ...]


class Router(ABC):
    """Interface of routers: match questions to caches, and assign finished turns."""

    prompt_names: ClassVar[frozenset[str]]  # names of the scoring prompts that it provides

    @abstractmethod
    def route(self, question: str) -> EpisodeMatch | None:
        """Match a bare question to an episode; None without episodes."""

    @abstractmethod
    def prompts(self) -> list[tuple[str, ...]]:
        """Representative segments per episode; empty with a single cache."""

    @abstractmethod
    def segments(self) -> list[int]:
        """Number of segments per episode; empty with a single cache."""

    @abstractmethod
    def assign_turn(self, text: str, number: int) -> TurnAssignment:
        """Assign a turn that cache `number` has answered to a cache.

        Args:
            text: question and answer, as one segment.
        """

    @abstractmethod
    def refresh(self, number: int) -> EpisodeRefresh:
        """Run stage 1 again after cache `number` has exceeded its bound."""

    @abstractmethod
    def to_record(self) -> dict[str, Any]:
        """JSON record of the router, for `Arrangement.restore_router`."""


class SingleCacheRouter(Router):
    """Router of a single cache."""

    prompt_names = frozenset()

    def route(self, question: str) -> EpisodeMatch | None:
        return None

    def prompts(self) -> list[tuple[str, ...]]:
        return []

    def segments(self) -> list[int]:
        return []

    def assign_turn(self, text: str, number: int) -> TurnAssignment:
        return TurnAssignment(self, number)

    def refresh(self, number: int) -> EpisodeRefresh:
        return EpisodeRefresh(self, (number,))

    def to_record(self) -> dict[str, Any]:
        return {}
