"""Which cache answers, and where a finished turn belongs: the only cache, or episodes.

Routers are values: filing a turn or forming episodes anew gives another router, so that a chat
changes from one state to the next in a single step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from larder.session.embedders.base import Embedder
from larder.session.episodes.matching import (
    TAU_NEVER,
    EpisodeMatch,
    MatchRule,
    is_new_topic,
    match_episode,
)
from larder.session.episodes.segments import HistoryTurn


@dataclass(frozen=True)
class Episode:
    """A topic of the conversation and what stands for it.

    Args:
        centroid: mean of its segments' embeddings.
        rows: those embeddings, one per segment.
        texts: its segments, in order.
        representatives: which of them make its prompt.
        places: where its segments stand among all segments of the conversation.
    """

    centroid: Float32[np.ndarray, " D"]
    rows: Float32[np.ndarray, "N D"]
    texts: tuple[str, ...]
    representatives: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def prompt_texts(self) -> tuple[str, ...]:
        """The segments that its cache is judged by."""
        return tuple(self.texts[index] for index in self.representatives)

    def with_segment(self, row: Float32[np.ndarray, " D"], text: str, place: int) -> Episode:
        """The episode with one more segment; centroid and prompt wait for the next refresh."""
        return replace(
            self,
            rows=np.vstack([self.rows, row]),
            texts=(*self.texts, text),
            places=(*self.places, place),
        )


@runtime_checkable
class EpisodeClusterer(Protocol):
    """Stage 1 of EpiCache: sorts segments into episodes."""

    def episodes(
        self, texts: Sequence[str], rows: Float32[np.ndarray, "N D"]
    ) -> tuple[Episode, ...]:
        """Segments sorted into episodes, each with its representatives."""
        ...

    def refresh_episode(self, episode: Episode) -> Episode:
        """The same segments under a new centroid and new representatives."""
        ...

    def fitting(self, segments: int) -> int:
        """How many episodes so many segments should form at least."""
        ...

    def tau(
        self,
        rows: Float32[np.ndarray, "N D"],
        turns: Float32[np.ndarray, "T D"],
        places: Sequence[tuple[int, ...]],
        count: int,
    ) -> float:
        """The similarity below which a turn opens an episode of its own.

        Args:
            rows: of all segments.
            turns: of all exchanges.
            places: per exchange, the segments that hold some of it.
            count: episodes that the segments form.
        """
        ...


@dataclass(frozen=True)
class TurnAssignment:
    """Where a finished turn belongs.

    Args:
        router: the way to the caches once the turn is filed.
        number: the cache that holds the turn; not the one that answered if its topic is new.
    """

    router: Router
    number: int


@dataclass(frozen=True)
class EpisodeRefresh:
    """What a refresh changes.

    Args:
        router: with new centroids and prompts.
        rebuilt: the caches to build anew.
    """

    router: Router
    rebuilt: tuple[int, ...]


class Router(ABC):
    """Chooses a cache for a question and files finished turns."""

    prompt_names: ClassVar[frozenset[str]]  # the names of the prompts that it provides

    @abstractmethod
    def route(self, question: str) -> EpisodeMatch | None:
        """The episode that a bare question belongs to; None where there are no episodes."""

    @abstractmethod
    def prompts(self) -> list[tuple[str, ...]]:
        """Per episode, the segments that its cache is judged by; none where all share a cache."""

    @abstractmethod
    def segments(self) -> list[int]:
        """Per episode, how many segments are filed under it; none where all share a cache."""

    @abstractmethod
    def file(self, text: str, number: int) -> TurnAssignment:
        """Find out where a turn belongs that cache `number` has answered.

        Args:
            text: question and answer, as one segment.
        """

    @abstractmethod
    def refresh(self, number: int) -> EpisodeRefresh:
        """Run stage 1 again, because cache `number` has grown beyond its bound."""

    @abstractmethod
    def told(self) -> dict[str, Any]:
        """All that it knows, as JSON can say it; its arrangement makes it again of that."""


# New topics open episodes; beyond this many times the number once formed, a refresh forms all anew,
# so that the bytes of all episodes together stay bounded.
MAX_EPISODE_FACTOR = 2


class SingleCacheRouter(Router):
    """Nothing to choose."""

    prompt_names = frozenset()

    def route(self, question: str) -> EpisodeMatch | None:
        del question
        return None

    def prompts(self) -> list[tuple[str, ...]]:
        return []

    def segments(self) -> list[int]:
        return []

    def file(self, text: str, number: int) -> TurnAssignment:
        del text
        return TurnAssignment(self, number)

    def refresh(self, number: int) -> EpisodeRefresh:
        return EpisodeRefresh(self, (number,))

    def told(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, eq=False)
class NearestEpisodeRouter(Router):
    """The episode whose centroid is nearest to the bare question (arXiv:2509.17396, eq. 7).

    Turns are filed by the paper's stage 3b. Its threshold applies to turns alone, by cosine
    whatever the rule for questions: a question always has an episode.

    Args:
        turns: all that was said, exchange by exchange, to calibrate tau on.
        formed: how many episodes stage 1 has formed; turns have opened the others.
        formed_of: the number of segments it had then.
        tau: calibrated when the first turn after stage 1 is filed; None until then.
    """

    prompt_names = frozenset({"episode"})

    embedder: Embedder
    rule: MatchRule
    episodes: tuple[Episode, ...]
    clusterer: EpisodeClusterer = field(repr=False)
    turns: tuple[HistoryTurn, ...] = field(default=(), repr=False)
    formed: int = 0
    formed_of: int = 0
    tau: float | None = None

    def route(self, question: str) -> EpisodeMatch | None:
        if not self.episodes:
            return None
        row = self.embedder.embed_questions([question])[0]
        return match_episode(row, self._centroids(), self.rule)

    def prompts(self) -> list[tuple[str, ...]]:
        return [episode.prompt_texts for episode in self.episodes]

    def segments(self) -> list[int]:
        return [len(episode.texts) for episode in self.episodes]

    def file(self, text: str, number: int) -> TurnAssignment:
        row = self.embedder.embed_segments([text])[0]
        place = sum(len(episode.texts) for episode in self.episodes)
        alone = Episode(row, row[None], (text,), (0,), (place,))
        turns = (*self.turns, HistoryTurn(text, (place,)))
        if not self.episodes:
            first = replace(
                self, episodes=(alone,), turns=turns, formed=1, formed_of=1, tau=TAU_NEVER
            )
            return TurnAssignment(first, number)
        tau = self._tau() if self.tau is None else self.tau
        episodes = list(self.episodes)
        if is_new_topic(match_episode(row, self._centroids()).similarity, tau):
            number = len(episodes)
            episodes.append(alone)
        else:
            episodes[number] = episodes[number].with_segment(row, text, place)
        return TurnAssignment(replace(self, episodes=tuple(episodes), turns=turns, tau=tau), number)

    def refresh(self, number: int) -> EpisodeRefresh:
        texts, rows = self._rows()
        fitting = self.clusterer.fitting(len(texts))
        has_grown = fitting > max(len(self.episodes), self.clusterer.fitting(self.formed_of))
        if has_grown or len(self.episodes) > MAX_EPISODE_FACTOR * max(fitting, self.formed):
            episodes = self.clusterer.episodes(texts, rows)
            router = replace(
                self, episodes=episodes, formed=len(episodes), formed_of=len(texts), tau=None
            )
            return EpisodeRefresh(router, tuple(range(len(episodes))))
        episodes = list(self.episodes)
        episodes[number] = self.clusterer.refresh_episode(episodes[number])
        return EpisodeRefresh(replace(self, episodes=tuple(episodes)), (number,))

    def told(self) -> dict[str, Any]:
        return {
            "embedder": self.embedder.name,
            "episodes": [arrays_to_json(vars(episode)) for episode in self.episodes],
            "turns": [[turn.text, list(turn.places)] for turn in self.turns],
            "formed": [self.formed, self.formed_of],
            "tau": self.tau,
        }

    def _tau(self) -> float:
        turns = self.embedder.embed_segments([turn.text for turn in self.turns])
        places = [turn.places for turn in self.turns]
        return self.clusterer.tau(self._rows()[1], turns, places, self.formed)

    def _centroids(self) -> Float32[np.ndarray, "E D"]:
        return np.stack([episode.centroid for episode in self.episodes])

    def _rows(self) -> tuple[tuple[str, ...], Float32[np.ndarray, "N D"]]:
        """All segments in the order they were said."""
        order = np.argsort([place for episode in self.episodes for place in episode.places])
        texts = [text for episode in self.episodes for text in episode.texts]
        rows = np.concatenate([episode.rows for episode in self.episodes])
        return tuple(texts[index] for index in order), rows[order]


_TYPE = "<f4"


def arrays_to_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values by name, with arrays as `{"shape", "base64"}` and tuples as lists."""
    return {name: _value_to_json(value) for name, value in values.items()}


def array_from_json(told: Any) -> Float32[np.ndarray, "..."]:
    """The array that was spelled.

    Raises:
        KeyError, TypeError, ValueError: this is none.
    """
    data = b64decode(told["base64"], validate=True)
    return np.frombuffer(data, _TYPE).reshape(told["shape"]).astype(np.float32)


def _value_to_json(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return list(value)
    data = np.ascontiguousarray(value, dtype=_TYPE).tobytes()
    return {"shape": list(value.shape), "base64": b64encode(data).decode()}
