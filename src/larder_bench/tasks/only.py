"""Subset of another task's questions: by kind, by number of sources, by similarity to one episode.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 4.2, groups questions by how
many passages of the conversation they need (figure 8), and by whether one centroid stands out among
their similarities to all (table 1, "Single" and "Cross"). It gives no threshold; here it is the
median of the conversation's questions, so that each half of them is one of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from larder.core import BadParameter, Conversation, Question, TooLittle
from larder.session import SEED, cluster, cut_segments
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask, make_with_seed_retries, parse_inner_task

MAX_SOURCES = 3  # this many sources or more


class EpisodeFilter(Enum):
    """Selection of questions by their episodes.

    ANY: all questions.
    SINGLE: questions similar to one episode.
    CROSS: questions similar to several.
    """

    ANY = "any"
    SINGLE = "single"
    CROSS = "cross"


@dataclass(frozen=True)
class QuestionSubset(BenchTask):
    """Some of another task's questions. If a conversation has none of them, another one is
    generated.

    Args:
        of: spelling of the task whose conversations and questions are taken.
        kinds: kinds of questions separated by commas; empty for all.
        sources: number of passages that a question needs, 3 for 3 or more; None for all.
        episodes: `any`, `single` or `cross`.
        count: number of episodes that questions are compared with.
        embedder: embedder of segments and questions, as for episodes; not `tokens`.
    """

    of: str = "lifelog()"
    kinds: str = ""
    sources: int | None = None
    episodes: EpisodeFilter = EpisodeFilter.ANY
    count: int = 4
    embedder: str = "minilm"

    def __post_init__(self) -> None:
        parse_inner_task("only", self.of)
        if self.sources is not None and not 1 <= self.sources <= MAX_SOURCES:
            raise BadParameter(f"only.sources must be 1 to {MAX_SOURCES}, got {self.sources}.")
        if self.count < 2:
            raise BadParameter(f"only.count must be 2 or more, got {self.count}.")
        if self.embedder == "tokens":
            raise BadParameter(
                "only.embedder must be independent of the model that is asked, got tokens: "
                "take minilm."
            )

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        task = parse_inner_task("only", self.of)

        def generate(retry_seed: int) -> Conversation:
            whole = task.make(retry_seed, tokens, sources)
            questions = [one for one in whole.questions if self._fits(one)]
            if self.episodes is not EpisodeFilter.ANY:
                questions = self._select_by_episodes(whole, questions, sources)
            if not questions:
                raise TooLittle(
                    f"only.of={self.of} has no such questions at {tokens} tokens: take more "
                    "tokens, or more kinds."
                )
            return replace(whole, questions=tuple(questions))

        return make_with_seed_retries(seed, tokens, generate)

    def _fits(self, question: Question) -> bool:
        if self.kinds and question.kind not in self.kinds.split(","):
            return False
        if self.sources is None:
            return True
        return question.sources is not None and min(question.sources, MAX_SOURCES) == self.sources

    def _select_by_episodes(
        self, whole: Conversation, questions: Sequence[Question], sources: TaskSources
    ) -> list[Question]:
        """Questions of one half, by the lead of the most similar centroid over the second."""
        leads = self._leads(whole, questions, sources) if questions else np.zeros(0)
        is_single = leads > np.median(leads) if len(leads) > 1 else leads > 1
        is_selected = is_single == (self.episodes is EpisodeFilter.SINGLE)
        return [one for one, selected in zip(questions, is_selected, strict=True) if selected]

    def _leads(
        self, whole: Conversation, questions: Sequence[Question], sources: TaskSources
    ) -> np.ndarray:
        embedder = sources.embedder(self.embedder)
        rows = embedder.embed_segments([segment.text for segment in cut_segments(whole)])
        centroids = cluster(rows, self.count, SEED).centroids
        embedded = embedder.embed_questions([one.question for one in questions])
        similarities = embedded @ centroids.T / np.linalg.norm(centroids, axis=1)
        similarities = np.sort(similarities, axis=1)
        if similarities.shape[1] < 2:
            return np.full(len(questions), np.inf)
        return similarities[:, -1] - similarities[:, -2]


Part = QuestionSubset
