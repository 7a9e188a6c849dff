"""Episode matching of questions (cosine or dot), and the threshold tau for new topics.

Follows M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv 2509.17396, section 3.1, equation 7
and stage 3b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from jaxtyping import Float32

from larder.core.errors import BadParameter
from larder.session.episodes.clustering import SEED, cluster

FOLDS = 5
TAU_NEVER = -1.0  # a threshold that no cosine is below


class MatchRule(Enum):
    """Similarity of a question to an episode.

    COSINE: as in the paper; the length of a centroid does not count.
    DOT: as in the released code; unit question times mean, so tight episodes are favored.
    """

    COSINE = "cosine"
    DOT = "dot"


@dataclass(frozen=True)
class EpisodeMatch:
    """Matched episode, and its similarity by the rule."""

    episode: int
    similarity: float


def match_episode(
    question: Float32[np.ndarray, " D"],
    centroids: Float32[np.ndarray, "E D"],
    rule: MatchRule = MatchRule.COSINE,
) -> EpisodeMatch:
    """Find the episode nearest to a question; of equals the first.

    The embedded text should be the bare question. The released code embeds the whole formatted
    prompt, which pulls all questions in one direction. A question always has an episode: no
    threshold applies here.

    Raises:
        BadParameter: there is no episode to choose from.
    """
    if len(centroids) == 0:
        raise BadParameter("cannot match a question against 0 episodes; read a conversation first.")
    rows = centroids.astype(np.float64)
    similarities = rows @ question.astype(np.float64)
    if rule is MatchRule.COSINE:
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(question)
        # Rows that cancel have a centroid at zero, without direction: its similarity is 0.
        similarities = np.divide(
            similarities, lengths, out=np.zeros_like(similarities), where=lengths > 0
        )
    episode = int(similarities.argmax())
    return EpisodeMatch(episode, float(similarities[episode]))


def is_new_topic(similarity: float, tau: float) -> bool:
    """Test whether a chat turn opens a new episode (the paper's 3b-2).

    The paper applies its threshold to the query and gives it no value; the released code has none.
    Here it applies to turns alone: questions always go to the nearest episode.
    """
    return similarity < tau


def calibrate_tau(
    segments: Float32[np.ndarray, "N D"],
    turns: Float32[np.ndarray, "T D"],
    places: Sequence[tuple[int, ...]],
    count: int = 4,
    quantile: float = 0.05,
    folds: int = FOLDS,
    seed: int = SEED,
) -> float:
    """Calibrate tau: the cosine below which a share `quantile` of turns on known topics lie.

    Text that is part of a centroid is nearer to it than a new turn will be, so each turn is
    compared with episodes formed without it (cross-validation): segments are divided into `folds`;
    a turn belongs to the fold of its first segment, and the turns of a fold are compared with the
    centroids of the segments that share no text with them. Without held-out segments the result is
    -1: no turn is ever new.

    The share holds for turns like those of the history. Measured at the nominal 0.05 with MiniLM
    and four episodes, questions about the history with their expected answers, added as turns,
    opened an episode in 0.21 of 24 on the demo conversation, 0.06 of 53 and 0.02 of 43 on two
    4000-token lifelogs, and 0.00 of 85 and 0.00 of 70 on two RealTalk transcripts (calibrated on
    the segments themselves: 0.25, 0.15, 0.07, 0.36, 0.21). Taking the higher of the similarities of
    turn and bare question, in calibration too, gave 0.21, 0.09, 0.05, 0.00, 0.00: no better.

    Args:
        segments: unit rows of the segments that form episodes.
        turns: unit rows of single turns, embedded as new turns will be.
        places: per turn, the segments that share text with it, at least one.
        count: number of episodes to form.
        quantile: in [0, 1]; the share of turns on old topics that open an episode by mistake.
        folds: number of folds, at least 2.
        seed: seed of the folds and of the episodes.

    Raises:
        BadParameter: `quantile` or `folds` outside its range.
    """
    if not 0 <= quantile <= 1:
        raise BadParameter(f"tau.quantile must be in [0, 1], got {quantile}.")
    if folds < 2:
        raise BadParameter(f"tau.folds must be at least 2, got {folds}.")
    fold_of_segment = np.random.default_rng(seed).permutation(len(segments)) % folds
    similarities: list[float] = []
    for fold in range(folds):
        held_out = [turn for turn, own in enumerate(places) if fold_of_segment[own[0]] == fold]
        rest = np.ones(len(segments), bool)
        rest[[place for turn in held_out for place in places[turn]]] = False
        if held_out and rest.any():
            centroids = cluster(segments[rest], count, seed).centroids
            similarities += [match_episode(turns[turn], centroids).similarity for turn in held_out]
    return float(np.quantile(similarities, quantile)) if similarities else TAU_NEVER
