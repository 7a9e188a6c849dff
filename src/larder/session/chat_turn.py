"""What a chat knows of a turn: the cache that reads it, where it is filed, and how to undo it."""

from __future__ import annotations

from dataclasses import dataclass

from larder.cache.sequence import SequenceCache
from larder.prefill.turn_reader import TurnReader
from larder.session.chat_state import ChatState
from larder.session.episodes.matching import EpisodeMatch


@dataclass(frozen=True)
class ActiveTurn:
    """The cache that answers a question, and where it stood before.

    Args:
        number: of the cache.
        mark: true position of the question's first token.
        turn: what reads the turn into the cache.
        plans: that the cache had carried out before.
        is_copy: whether `cache` is a copy, which takes the place of the cache once the turn is
            filed; else the turn is taken back by `Cabinet.undo`.
    """

    number: int
    cache: SequenceCache
    match: EpisodeMatch | None
    mark: int
    turn: TurnReader
    plans: int
    is_copy: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether the turn can no longer be cut off the cache."""
        return self.is_copy or self.cache.plans != self.plans

    @property
    def copy(self) -> SequenceCache | None:
        """What is held beside the cache of the shelf, so that the turn can be undone."""
        return self.cache if self.is_copy else self.turn.saved

    @property
    def can_be_undone(self) -> bool:
        """Whether the cache can be had as it was before the turn."""
        return not self.is_cut or self.is_copy or self.turn.saved is not None


@dataclass(frozen=True)
class TurnUndo:
    """How to take a turn back: the state before, and the cache that has grown since `mark`."""

    state: ChatState
    number: int
    mark: int


@dataclass(frozen=True)
class TurnCommit:
    """The state behind a turn, and the number of the cache that holds the turn in it."""

    state: ChatState
    number: int
