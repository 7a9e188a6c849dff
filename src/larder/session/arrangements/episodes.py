"""Episodes: one cache per episode of the conversation; a question goes to the nearest one.

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 3.1, stage 1. Where the
released code differs from the paper, the defaults are: cosine matching (paper; the code takes the
dot product with the raw centroid), the bare question (paper; the code embeds its whole prompt),
eight representative segments (the code's scripts; its default is 4, the paper's 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float32

from larder.core.arguments import require_at_least
from larder.core.conversation import Conversation
from larder.core.errors import BadParameter
from larder.session.arrangements.base import Arrangement
from larder.session.embedders.base import Embedder
from larder.session.episodes.clustering import (
    CLUSTER_COUNTS,
    choose_cluster_count,
    cluster,
    representatives,
)
from larder.session.episodes.nearest_episode import (
    Episode,
    MatchRule,
    NearestEpisodeRouter,
    array_from_json,
    calibrate_tau,
)
from larder.session.episodes.segments import HistoryTurn, SegmentUnit, cut_segments, history_turns
from larder.session.routing import Router

MIN_SEGMENTS = 2  # per episode, before a chat that has grown is divided into topics


@dataclass(frozen=True)
class Episodes(Arrangement):
    """Clusters of segments with one cache each.

    Args:
        count: E, the number of episodes; 0 chooses it by silhouette between 2 and 8.
        segment: size of a segment, in units, at least 1.
        unit: `utterances`, `words` or `tokens`.
        representatives: number of segments nearest to the centroid in the prompt of an episode.
        embedder: `minilm`, `tokens`, or the name or folder of an embedding model.
        match: `cosine` or `dot`.
        tau_quantile: a chat turn opens a new episode when it is less similar to every centroid
            than this share of held-out turns of the history; questions about an old history are
            less like it than its own turns, so more of them do (`calibrate_tau` has the measured
            rates: 0 to 21% at the default).
        seed: seed of the clustering.
    """

    count: int = 4
    segment: int = 4
    unit: SegmentUnit = SegmentUnit.UTTERANCES
    representatives: int = 8
    embedder: str = "minilm"
    match: MatchRule = MatchRule.COSINE
    tau_quantile: float = 0.05
    seed: int = 42

    def __post_init__(self) -> None:
        require_at_least(1, "episodes", segment=self.segment, representatives=self.representatives)
        if self.count < 0:
            raise BadParameter(
                f"episodes.count must be at least 1, or 0 to choose it by silhouette, "
                f"got {self.count}."
            )
        if not 0 <= self.tau_quantile < 1:
            raise BadParameter(
                f"episodes.tau_quantile must be a fraction in [0, 1), got {self.tau_quantile}."
            )

    def embedders(self) -> tuple[str, ...]:
        return (self.embedder,)

    def build_router(
        self,
        conversation: Conversation,
        embedder: Callable[[str], Embedder],
        count: Callable[[str], int],
        turn_texts: Sequence[str] = (),
    ) -> Router:
        segments = cut_segments(conversation, self.unit, self.segment, count)
        loaded = embedder(self.embedder)
        texts = [*(segment.text for segment in segments), *turn_texts]
        if not texts:
            return NearestEpisodeRouter(loaded, self.match, (), self)
        turns = [
            *history_turns(conversation, segments),
            *(HistoryTurn(text, (len(segments) + index,)) for index, text in enumerate(turn_texts)),
        ]
        # The history forms as many episodes as when it was prefilled; turns add more once they
        # suffice.
        formed = max(min(self._target_count, len(segments)), self.min_episodes(len(texts)))
        clusterer = self if formed >= self._target_count else replace(self, count=formed)
        episodes = clusterer.episodes(texts, loaded.embed_segments(texts))
        return NearestEpisodeRouter(
            loaded, self.match, episodes, self, tuple(turns), len(episodes), len(texts)
        )

    def restore_router(
        self, record: Mapping[str, Any], embedder: Callable[[str], Embedder]
    ) -> Router:
        loaded = embedder(self.embedder)
        if record["embedder"] != loaded.name:
            raise ValueError(f"its texts were embedded by {record['embedder']}")
        episodes = tuple(_episode_from_record(episode) for episode in record["episodes"])
        turns = tuple(
            HistoryTurn(str(text), _numbers(indices)) for text, indices in record["turns"]
        )
        formed, formed_of = _numbers(record["formed"])
        tau = None if record["tau"] is None else float(record["tau"])
        return NearestEpisodeRouter(
            loaded, self.match, episodes, self, turns, formed, formed_of, tau
        )

    def episodes(
        self, texts: Sequence[str], rows: Float32[np.ndarray, "N D"]
    ) -> tuple[Episode, ...]:
        """Cluster segments into episodes, each with its representatives."""
        clusters = cluster(
            rows, self.count or choose_cluster_count(rows, seed=self.seed), self.seed
        )
        return tuple(
            _episode(
                texts,
                rows,
                clusters.centroids[index],
                members,
                representatives(rows, clusters, index, self.representatives),
            )
            for index, members in enumerate(clusters.members)
        )

    def refresh_episode(self, episode: Episode) -> Episode:
        """Recompute centroid and representatives of an episode over the same segments."""
        [formed] = replace(self, count=1).episodes(episode.texts, episode.rows)
        return replace(formed, places=episode.places)

    def min_episodes(self, segments: int) -> int:
        """Smallest number of episodes for a number of segments."""
        return max(1, min(self._target_count, segments // MIN_SEGMENTS))

    def tau(
        self,
        rows: Float32[np.ndarray, "N D"],
        turns: Float32[np.ndarray, "T D"],
        turn_segments: Sequence[tuple[int, ...]],
        count: int,
    ) -> float:
        """Similarity below which a turn opens a new episode."""
        return calibrate_tau(rows, turns, turn_segments, count, self.tau_quantile, seed=self.seed)

    @property
    def _target_count(self) -> int:
        """Number of episodes that a conversation of sufficient length should have, at least."""
        return self.count or CLUSTER_COUNTS.start


def _episode(
    texts: Sequence[str],
    rows: Float32[np.ndarray, "N D"],
    centroid: Float32[np.ndarray, " D"],
    members: tuple[int, ...],
    chosen: tuple[int, ...],
) -> Episode:
    return Episode(
        centroid,
        rows[list(members)],
        tuple(texts[index] for index in members),
        tuple(members.index(index) for index in chosen),
        members,
    )


def _episode_from_record(record: Mapping[str, Any]) -> Episode:
    """Restore an episode.

    Raises:
        ValueError: the lengths of its fields contradict each other.
    """
    episode = Episode(
        array_from_json(record["centroid"]),
        array_from_json(record["rows"]),
        tuple(map(str, record["texts"])),
        _numbers(record["representatives"]),
        _numbers(record["places"]),
    )
    count = len(episode.texts)
    fits = episode.rows.shape == (count, *episode.centroid.shape) and len(episode.places) == count
    if not fits or not all(0 <= number < count for number in episode.representatives):
        raise ValueError("the fields of an episode have different lengths")
    return episode


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(number) is int for number in values):
        raise TypeError("numbers")
    return tuple(values)


Part = Episodes
