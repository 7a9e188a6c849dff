"""RAG-Episodic: the segments of the question's episode most similar to the question.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 4: episodes are formed and
matched as for EpiCache's caches, and the text of the matching one is read up to the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder.core import BadParameter
from larder_bench.retrievals.base import RetrievalBaseline, SegmentIndex, check_retrieval_sizes


@dataclass(frozen=True)
class RagEpisodic(RetrievalBaseline):
    """Segments of the nearest cluster, by their similarity to the question.

    Args:
        count: number of episodes.
        segment: utterances per segment.
        embedder: embedder of segments and questions, as for episodes.
        tokens: maximum number of tokens; None for the budget.
        seed: seed of the clustering.
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
