"""K-means clustering of segments into episodes, and keywords of episodes.

Follows M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv 2509.17396, section 3.1, equations 5
and 6. k-means is scikit-learn's: k-means++ and Lloyd on unit rows, as in the released code (seed
42, ten starts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from larder.core.arguments import require
from larder.core.errors import BadParameter

SEED = 42
KMEANS_STARTS = 10
CLUSTER_COUNTS = range(2, 9)
DUPLICATE_DISTANCE = 1e-4  # equal texts of different batches are about 1e-6 apart
WORD = r"(?u)\b[^\W\d_]{3,}\b"  # no numbers, no fragments


@dataclass(frozen=True, eq=False)
class SegmentClusters:
    """Assignment of segments to episodes. Episodes are numbered by their first segment.

    Args:
        labels: episode of each segment.
        centroids: mean of the rows of each episode, not normalized.
    """

    labels: Int64[np.ndarray, " N"]
    centroids: Float32[np.ndarray, "E D"]

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Segments of each episode, in order."""
        episodes = range(len(self.centroids))
        return tuple(tuple(np.flatnonzero(self.labels == e).tolist()) for e in episodes)


def cluster(
    embeddings: Float32[np.ndarray, "N D"], count: int = 4, seed: int = SEED
) -> SegmentClusters:
    """Cluster segments into episodes.

    There are never more episodes than distinct segments, so none is empty. Paper and released code
    agree on this part; the code fails on fewer segments than episodes.

    Args:
        embeddings: unit rows, one per segment, at least one.
        count: number of episodes, at least 1.
        seed: seed of the initial centroids.

    Raises:
        BadParameter: no segments, or `count` below 1.
    """
    require(count >= 1, "episodes.count", "at least 1", count)
    if len(embeddings) == 0:
        raise BadParameter("cannot form episodes of 0 segments; the conversation has no messages.")
    return _ordered_clusters(embeddings, _labels(embeddings, count, seed))


def choose_cluster_count(
    embeddings: Float32[np.ndarray, "N D"], counts: range = CLUSTER_COUNTS, seed: int = SEED
) -> int:
    """Number of episodes with the best silhouette score.

    P. Rousseeuw, "Silhouettes: a graphical aid to the interpretation and validation of cluster
    analysis" (1987). The paper takes 4 and leaves the choice by data to future work. The smallest
    of equals wins; 1 where the silhouette is undefined (fewer than 3 segments, or all equal).
    """
    from sklearn.metrics import silhouette_score

    rows = embeddings.astype(np.float64)
    most = min(_distinct_rows(embeddings), len(embeddings) - 1)
    scores = {
        count: silhouette_score(rows, _labels(embeddings, count, seed))
        for count in counts
        if 2 <= count <= most
    }
    return max(scores, key=lambda count: (scores[count], -count), default=1)


def representatives(
    embeddings: Float32[np.ndarray, "N D"], clusters: SegmentClusters, episode: int, count: int
) -> tuple[int, ...]:
    """Representative segments of an episode for its patched prompt, in chronological order.

    They are the `count` members with the highest cosine to the centroid; of equals the earlier. The
    paper takes 1 (equation 6), the released code 4 by default, its published scripts 8.

    Raises:
        BadParameter: no such episode, or `count` below 1.
    """
    if not 0 <= episode < len(clusters.centroids):
        raise BadParameter(f"episode must be below {len(clusters.centroids)}, got {episode}.")
    if count < 1:
        raise BadParameter(f"representative segments must be at least 1, got {count}.")
    members = np.flatnonzero(clusters.labels == episode)
    # Unit rows: within one episode the centroid's length changes no order.
    # Rounded, because equal texts of different batches differ in the last digits.
    nearness = (embeddings[members].astype(np.float64) @ clusters.centroids[episode]).round(6)
    nearest = np.argsort(-nearness, kind="stable")[:count]
    return tuple(sorted(members[nearest].tolist()))


def _labels(embeddings: Float32[np.ndarray, "N D"], count: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    count = min(count, _distinct_rows(embeddings))
    # pyright infers the type of `n_init` from its default "auto"; scikit-learn takes numbers.
    starts: Any = KMEANS_STARTS
    means = KMeans(n_clusters=count, n_init=starts, random_state=seed)
    # On a few hundred rows threads cost more than they save; sums must not depend on their number.
    with threadpool_limits(1):
        # In float64, rows that differ by rounding alone still have a distance.
        return means.fit_predict(embeddings.astype(np.float64))


def _distinct_rows(embeddings: Float32[np.ndarray, "N D"]) -> int:
    """Number of distinct rows; rows within rounding distance count as equal."""
    rows = embeddings.astype(np.float64)
    squares = (rows * rows).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * rows @ rows.T  # [N, N], squared
    repeats_earlier = np.tril(distances < DUPLICATE_DISTANCE**2, -1).any(axis=1)
    return int((~repeats_earlier).sum())


def _ordered_clusters(
    embeddings: Float32[np.ndarray, "N D"], labels: np.ndarray
) -> SegmentClusters:
    _, firsts, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(firsts))
    ordered = rank[inverse].astype(np.int64)
    rows = [embeddings[ordered == e].mean(axis=0, dtype=np.float64) for e in range(len(firsts))]
    return SegmentClusters(ordered, np.stack(rows).astype(np.float32))


def episode_keywords(texts: Sequence[str], count: int = 5) -> list[tuple[str, ...]]:
    """TF-IDF keywords of each text against the others, highest weight first.

    Empty for a single text, which has nothing to compare with.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    if len(texts) < 2:
        return [()] * len(texts)
    vectorizer = CountVectorizer(stop_words="english", token_pattern=WORD)
    try:
        matrix: Any = vectorizer.fit_transform(texts)
    except ValueError:  # nothing but stop words
        return [()] * len(texts)
    counts = matrix.toarray()  # [E, words]
    # A word that occurs in all texts has weight 0, however frequent it is.
    rarity = np.log(len(texts) / (counts > 0).sum(axis=0))
    weights = np.log1p(counts) * rarity
    words = vectorizer.get_feature_names_out()
    ranked = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    return [
        tuple(str(words[w]) for w in row if weights[index, w] > 0)
        for index, row in enumerate(ranked)
    ]
