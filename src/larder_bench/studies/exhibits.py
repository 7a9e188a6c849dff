"""Exhibits of a conversation's caches: budgets by layer and head, and episodes on a map.

They are computed from a prefilled memory, are written before the row of its cell, and are drawn by
`larder plot`. All computation is done here, so that a figure is the same wherever it is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from larder.core import BadParameter
from larder.policy import WITHOUT_LIMIT
from larder.session import ConversationMemory, Episode, NearestEpisodeRouter, episode_keywords
from larder_bench.results.rows import Row

SEED = 0
PERPLEXITY = 12.0  # effective number of neighbors of a segment; less if there are few segments
MIN_SEGMENTS = 3  # segments of a map
MAX_SEGMENT_CHARACTERS = 240  # stored text of a segment


def exhibit_rows(memory: ConversationMemory) -> list[Row]:
    """Exhibits of a memory: no budgets for the full cache, and no map without episodes."""
    is_full = memory.policy.budget.tokens == WITHOUT_LIMIT
    rows = [] if is_full else budget_rows(memory)
    has_map = (
        isinstance(memory.router, NearestEpisodeRouter) and _count(memory.router) >= MIN_SEGMENTS
    )
    return [*rows, cluster_row(memory)] if has_map else rows


def budget_rows(memory: ConversationMemory) -> list[Row]:
    """Entries kept by each kv head of each layer, one row per episode.

    The caches are activated one after the other, then the formerly active one again.
    """
    count = max(1, len(memory.router.prompts()))
    before, rows = memory.caches.active_number, list[Row]()
    for index in range(count):
        cache = memory.caches.activate(index)
        sliding = [layer.index for layer in cache.spec.layers if layer.sliding_window is not None]
        data = {
            "row": "budgets",
            "episode": index,
            "context_tokens": memory.figures.context_tokens,
            "budget_tokens": memory.figures.budget_tokens,
            "lengths": [list(layer) for layer in cache.lengths()],
            "sliding_layers": sliding,
        }
        rows.append(data)
    if before is None:
        memory.caches.offload_active()
    else:
        memory.caches.activate(before)
    return rows


def cluster_row(memory: ConversationMemory) -> Row:
    """Map of a conversation's segments, with the episode of each.

    The map is a t-SNE of their embeddings: L. van der Maaten and G. Hinton, "Visualizing Data using
    t-SNE" (2008), Journal of Machine Learning Research 9, by scikit-learn. Near segments stay near;
    distances between groups have no meaning.

    Raises:
        BadParameter: the policy forms no episodes, or there are fewer than three segments.
    """
    router = memory.router
    if not isinstance(router, NearestEpisodeRouter):
        raise BadParameter(
            f"A map of episodes needs a policy that forms them, got {memory.policy}: take epicache."
        )
    if (count := _count(router)) < MIN_SEGMENTS:
        raise BadParameter(f"A map of episodes needs {MIN_SEGMENTS} segments or more, got {count}.")
    points, perplexity = _tsne(np.concatenate([e.rows for e in router.episodes]))
    segments = [
        segment
        for index, episode in enumerate(router.episodes)
        for segment in _segments(index, episode)
    ]
    for segment, (x, y) in zip(segments, points.tolist(), strict=True):
        segment |= {"x": round(x, 3), "y": round(y, 3)}
    keywords = episode_keywords([" ".join(episode.texts) for episode in router.episodes])
    return {
        "row": "clusters",
        "context_tokens": memory.figures.context_tokens,
        "embedder": router.embedder.name,
        "map": {"method": "t-SNE", "perplexity": perplexity, "seed": SEED},
        "episodes": [{"topics": list(topics)} for topics in keywords],
        "segments": sorted(segments, key=lambda segment: segment["place"]),
    }


def _count(router: NearestEpisodeRouter) -> int:
    """Number of segments of all episodes."""
    return sum(len(episode.rows) for episode in router.episodes)


def _segments(number: int, episode: Episode) -> list[Row]:
    similarities = _cosines(episode.rows, episode.centroid)
    return [
        {
            "place": place,
            "episode": number,
            "representative": index in episode.representatives,
            "similarity": round(similarities[index], 4),
            "text": text[:MAX_SEGMENT_CHARACTERS],
        }
        for index, (place, text) in enumerate(zip(episode.places, episode.texts, strict=True))
    ]


def _cosines(rows: Float[np.ndarray, "N D"], centroid: Float[np.ndarray, " D"]) -> Sequence[float]:
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(centroid)
    return (rows @ centroid / np.maximum(lengths, 1e-12)).tolist()


def _tsne(rows: Float[np.ndarray, "N D"]) -> tuple[Float[np.ndarray, "N 2"], float]:
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
    # Started from principal components, the map is the same every time.
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=SEED, metric="cosine")
    return tsne.fit_transform(rows.astype(np.float64)), round(perplexity, 3)
