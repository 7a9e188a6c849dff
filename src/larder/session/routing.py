"""Which cache answers: the only one, or that of the nearest episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32

from larder.session.embedders.base import Embedder
from larder.session.matching import Match, Rule, match


@dataclass(frozen=True)
class Episode:
    """A topic of the conversation and what stands for it.

    Args:
        centroid: mean of its segments' embeddings.
        rows: those embeddings, one per segment.
        texts: its segments, in order.
        representatives: which of them make its prompt.
    """

    centroid: Float32[np.ndarray, " D"]
    rows: Float32[np.ndarray, "N D"]
    texts: tuple[str, ...]
    representatives: tuple[int, ...]

    @property
    def prompt_texts(self) -> tuple[str, ...]:
        """The segments that its cache is judged by."""
        return tuple(self.texts[index] for index in self.representatives)

    def grown(self, row: Float32[np.ndarray, " D"], text: str) -> Episode:
        """The episode with one more segment; centroid and prompt wait for the next refresh."""
        return replace(self, rows=np.vstack([self.rows, row]), texts=(*self.texts, text))


class Router(ABC):
    """Chooses a cache for a question."""

    @abstractmethod
    def route(self, question: str) -> Match | None:
        """The episode that a bare question belongs to; None where there are no episodes."""

    @abstractmethod
    def prompts(self) -> list[tuple[str, ...]]:
        """Per episode, the segments that its cache is judged by; none where all share a cache."""


class OneCache(Router):
    """Nothing to choose."""

    def route(self, question: str) -> Match | None:
        del question
        return None

    def prompts(self) -> list[tuple[str, ...]]:
        return []


class NearestEpisode(Router):
    """The episode whose centroid is nearest to the bare question (arXiv:2509.17396, eq. 7)."""

    def __init__(self, embedder: Embedder, rule: Rule, episodes: Sequence[Episode]) -> None:
        self.embedder = embedder
        self.rule = rule
        self.episodes = list(episodes)

    def route(self, question: str) -> Match | None:
        row = self.embedder.embed_questions([question])[0]
        return match(row, np.stack([episode.centroid for episode in self.episodes]), self.rule)

    def prompts(self) -> list[tuple[str, ...]]:
        return [episode.prompt_texts for episode in self.episodes]
