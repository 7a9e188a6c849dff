"""The segments of the question's episode that are most like the question: RAG-Episodic.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 4: episodes are formed and
matched as for EpiCache's caches, and the text of the one that matches is read up to the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder.core.errors import BadParameter
from larder_bench.retrievals.base import RetrievalBaseline, SegmentIndex, check_retrieval_sizes


@dataclass(frozen=True)
class RagEpisodic(RetrievalBaseline):
    """Segments of the nearest cluster, by their similarity to the question.

    Args:
        count: episodes.
        segment: utterances in each segment.
        embedder: as episodes have it.
        tokens: read at most; None takes the budget.
        seed: of the clustering.
    """

    count: int = 4
    segment: int = 4
    embedder: str = "minilm"
    tokens: int | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        check_retrieval_sizes("rag_episodic", self.segment, self.tokens)
        if self.count < 1:
            raise BadParameter(f"rag_episodic.count must be at least 1, got {self.count}.")

    def ranked(self, passages: SegmentIndex, question: str) -> Sequence[int]:
        return passages.nearest(question, passages.episode(question, self.count, self.seed))


Part = RagEpisodic
