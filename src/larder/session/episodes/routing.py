"""Routers: assignment of questions and finished turns to caches, one or one per episode.

Routers are immutable: assigning a turn or forming episodes again returns another router, so that a
chat changes its state in a single assignment.
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
    """Episode: a cluster of segments on one topic, with centroid and representatives.

    Args:
        centroid: mean of the embeddings of its segments.
        rows: embeddings, one per segment.
        texts: texts of its segments, in order.
        representatives: indices of the segments in its prompt.
        places: indices of its segments among all segments of the conversation.
    """

    centroid: Float32[np.ndarray, " D"]
    rows: Float32[np.ndarray, "N D"]
    texts: tuple[str, ...]
    representatives: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def prompt_texts(self) -> tuple[str, ...]:
        """Representative segments, which the entries of its cache are scored with."""
        return tuple(self.texts[index] for index in self.representatives)

    def with_segment(self, row: Float32[np.ndarray, " D"], text: str, place: int) -> Episode:
        """Episode with one more segment; centroid and prompt change at the next refresh."""
        return replace(
            self,
            rows=np.vstack([self.rows, row]),
            texts=(*self.texts, text),
            places=(*self.places, place),
        )


@runtime_checkable
class EpisodeClusterer(Protocol):
    """Interface of stage 1 of EpiCache: clustering of segments into episodes."""

    def episodes(
        self, texts: Sequence[str], rows: Float32[np.ndarray, "N D"]
    ) -> tuple[Episode, ...]:
        """Cluster segments into episodes, each with its representatives."""
        ...

    def refresh_episode(self, episode: Episode) -> Episode:
        """Recompute centroid and representatives of an episode over the same segments."""
        ...

    def min_episodes(self, segments: int) -> int:
        """Smallest number of episodes for a number of segments."""
        ...

    def tau(
        self,
        rows: Float32[np.ndarray, "N D"],
        turns: Float32[np.ndarray, "T D"],
        places: Sequence[tuple[int, ...]],
        count: int,
    ) -> float:
        """Similarity below which a turn opens a new episode.

        Args:
            rows: embeddings of all segments.
            turns: embeddings of all turns.
            places: per turn, the segments that share text with it.
            count: number of episodes that the segments form.
        """
        ...


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


# New topics open episodes; beyond this multiple of the number once formed, a refresh forms all of
# them again, so that the bytes of all episodes together stay bounded.
MAX_EPISODE_FACTOR = 2


class SingleCacheRouter(Router):
    """Router of a single cache."""

    prompt_names = frozenset()

    def route(self, question: str) -> EpisodeMatch | None:
        del question
        return None

    def prompts(self) -> list[tuple[str, ...]]:
        return []

    def segments(self) -> list[int]:
        return []

    def assign_turn(self, text: str, number: int) -> TurnAssignment:
        del text
        return TurnAssignment(self, number)

    def refresh(self, number: int) -> EpisodeRefresh:
        return EpisodeRefresh(self, (number,))

    def to_record(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, eq=False)
class NearestEpisodeRouter(Router):
    """Router to the episode with the nearest centroid (arXiv:2509.17396, eq. 7).

    Turns are assigned by the paper's stage 3b. Its threshold applies to turns alone, by cosine
    whatever the rule for questions: a question always has an episode.

    Args:
        turns: all turns so far, to calibrate tau on.
        formed: number of episodes formed by stage 1; turns have opened the others.
        formed_of: number of segments at that time.
        tau: threshold, calibrated at the first turn after stage 1; None until then.
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

    def assign_turn(self, text: str, number: int) -> TurnAssignment:
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
        min_episodes = self.clusterer.min_episodes(len(texts))
        has_grown = min_episodes > max(
            len(self.episodes), self.clusterer.min_episodes(self.formed_of)
        )
        if has_grown or len(self.episodes) > MAX_EPISODE_FACTOR * max(min_episodes, self.formed):
            episodes = self.clusterer.episodes(texts, rows)
            router = replace(
                self, episodes=episodes, formed=len(episodes), formed_of=len(texts), tau=None
            )
            return EpisodeRefresh(router, tuple(range(len(episodes))))
        episodes = list(self.episodes)
        episodes[number] = self.clusterer.refresh_episode(episodes[number])
        return EpisodeRefresh(replace(self, episodes=tuple(episodes)), (number,))

    def to_record(self) -> dict[str, Any]:
        return {
            "embedder": self.embedder.name,
            "episodes": [arrays_to_json(vars(episode)) for episode in self.episodes],
            "turns": [[turn.text, list(turn.segment_indices)] for turn in self.turns],
            "formed": [self.formed, self.formed_of],
            "tau": self.tau,
        }

    def _tau(self) -> float:
        turns = self.embedder.embed_segments([turn.text for turn in self.turns])
        places = [turn.segment_indices for turn in self.turns]
        return self.clusterer.tau(self._rows()[1], turns, places, self.formed)

    def _centroids(self) -> Float32[np.ndarray, "E D"]:
        return np.stack([episode.centroid for episode in self.episodes])

    def _rows(self) -> tuple[tuple[str, ...], Float32[np.ndarray, "N D"]]:
        """Texts and embeddings of all segments, in the order of the conversation."""
        order = np.argsort([place for episode in self.episodes for place in episode.places])
        texts = [text for episode in self.episodes for text in episode.texts]
        rows = np.concatenate([episode.rows for episode in self.episodes])
        return tuple(texts[index] for index in order), rows[order]


_TYPE = "<f4"


def arrays_to_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to JSON: arrays as `{"shape", "base64"}`, tuples as lists."""
    return {name: _value_to_json(value) for name, value in values.items()}


def array_from_json(record: Any) -> Float32[np.ndarray, "..."]:
    """Decode an array of `arrays_to_json`.

    Raises:
        KeyError, TypeError, ValueError: the record is malformed.
    """
    data = b64decode(record["base64"], validate=True)
    return np.frombuffer(data, _TYPE).reshape(record["shape"]).astype(np.float32)


def _value_to_json(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return list(value)
    data = np.ascontiguousarray(value, dtype=_TYPE).tobytes()
    return {"shape": list(value.shape), "base64": b64encode(data).decode()}
