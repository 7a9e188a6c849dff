"""Another task with some of its questions alone: by kind, by sources, by how near one episode is.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 4.2, groups questions by how
many places of the conversation they need (figure 8), and by whether one centroid stands out among
their similarities to all (table 1, "Single" and "Cross"). It does not say from which difference on
one does; here it is the median of the conversation's questions, so that each half of them is one of
the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from larder.core.conversation import Conversation, Question
from larder.core.errors import BadParameter, TooLittle
from larder.session.episodes.clustering import SEED, cluster
from larder.session.episodes.segments import cut_segments
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import Task, make_with_seed_retries, parse_inner_task

MAX_SOURCES = 3  # so many sources, or more


class EpisodeFilter(Enum):
    """ANY: all questions. SINGLE: those near to one episode. CROSS: those near to several."""

    ANY = "any"
    SINGLE = "single"
    CROSS = "cross"


@dataclass(frozen=True)
class QuestionSubset(Task):
    """Some of the questions. Where a conversation has none of them, another is made.

    Args:
        of: the task whose conversations and questions are taken, as it is written.
        kinds: of questions, with commas between; empty takes all.
        sources: places that a question needs, 3 for that many or more; left out, all.
        episodes: `any`, `single` or `cross`.
        count: episodes that questions are held against.
        embedder: of segments and questions, as episodes have it; not `tokens`.
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

        def made(own: int) -> Conversation:
            whole = task.make(own, tokens, sources)
            asked = [one for one in whole.questions if self._fits(one)]
            if self.episodes is not EpisodeFilter.ANY:
                asked = self._near(whole, asked, sources)
            if not asked:
                raise TooLittle(
                    f"only.of={self.of} asks nothing of that sort at {tokens} tokens: write more "
                    "tokens, or ask for more kinds."
                )
            return replace(whole, questions=tuple(asked))

        return make_with_seed_retries("only", seed, tokens, made)

    def _fits(self, question: Question) -> bool:
        if self.kinds and question.kind not in self.kinds.split(","):
            return False
        if self.sources is None:
            return True
        return question.sources is not None and min(question.sources, MAX_SOURCES) == self.sources

    def _near(
        self, whole: Conversation, asked: Sequence[Question], sources: TaskSources
    ) -> list[Question]:
        """Those of one half by how far the nearest centroid is ahead of the next."""
        leads = self._leads(whole, asked, sources) if asked else np.zeros(0)
        stands_out = leads > np.median(leads) if len(leads) > 1 else leads > 1
        wanted = self.episodes is EpisodeFilter.SINGLE
        return [one for one, single in zip(asked, stands_out, strict=True) if single == wanted]

    def _leads(
        self, whole: Conversation, asked: Sequence[Question], sources: TaskSources
    ) -> np.ndarray:
        embedder = sources.embedder(self.embedder)
        rows = embedder.embed_segments([segment.text for segment in cut_segments(whole)])
        centroids = cluster(rows, self.count, SEED).centroids
        questions = embedder.embed_questions([one.question for one in asked])
        nearness = questions @ centroids.T / np.linalg.norm(centroids, axis=1)
        nearness = np.sort(nearness, axis=1)
        if nearness.shape[1] < 2:
            return np.full(len(asked), np.inf)
        return nearness[:, -1] - nearness[:, -2]


Part = QuestionSubset
