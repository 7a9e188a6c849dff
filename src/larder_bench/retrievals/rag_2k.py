"""RAG-2K: the segments of the whole conversation most similar to the question.

M. Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 4, reads 2,000 tokens of them.
Here it reads as many as the budget, so that compared methods have equal size; `tokens=2048` is the
paper's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder_bench.retrievals.base import RetrievalBaseline, SegmentIndex, check_retrieval_sizes


@dataclass(frozen=True)
class Rag2k(RetrievalBaseline):
    """Segments by their similarity to the question.

    Args:
        segment: utterances per segment.
        embedder: embedder of segments and questions, as for episodes.
        tokens: maximum number of tokens; None for the budget.
    """

    segment: int = 4
    embedder: str = "minilm"
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_retrieval_sizes("rag_2k", self.segment, self.tokens)

    def ranked(self, passages: SegmentIndex, question: str) -> Sequence[int]:
        return passages.nearest(question, range(len(passages.segments)))


Part = Rag2k
