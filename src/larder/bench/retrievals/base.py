"""What every way to retrieve text can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from larder.bench.passages import Passages


class Retrieval(ABC):
    """Text in the place of a cache: for each question some segments are read, the rest is not.

    Implementations are frozen dataclasses. M. Kim et al., "EpiCache: Episodic KV Cache Management
    for Long-Term Conversation on Resource-Constrained Environments" (2025), arXiv:2509.17396,
    section 4, compares with two; it does not say how large chunks are, in what order they are read
    nor under which prompt. Here they are its segments of four utterances, in the order they were
    said, under the prompt of all other policies.
    """

    embedder: str
    segment: int
    tokens: int | None

    @abstractmethod
    def ranked(self, passages: Passages, question: str) -> Sequence[int]:
        """The segments that may be read, those wanted most first."""
