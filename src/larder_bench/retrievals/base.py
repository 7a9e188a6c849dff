"""Base of text retrievals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float32

from larder.core import BadParameter, BudgetError, Conversation, Message, PromptLayout
from larder.session import (
    Embedder,
    MessageSpan,
    Segment,
    SegmentClusters,
    SegmentUnit,
    TokenizerAdapter,
    cluster,
    cut_segments,
    match_episode,
)


class RetrievalBaseline(ABC):
    """Retrieval of text instead of a cache: for each question some segments are read, the rest is
    not.

    Implementations are frozen dataclasses. M. Kim et al., "EpiCache: Episodic KV Cache Management
    for Long-Term Conversation on Resource-Constrained Environments" (2025), arXiv:2509.17396,
    section 4, compares with two; it does not state the size of chunks, their order, or
    the prompt. Here they are its segments of four utterances, in conversation order, with the
    prompt of all other policies.
    """

    embedder: str
    segment: int
    tokens: int | None

    @abstractmethod
    def ranked(self, passages: SegmentIndex, question: str) -> Sequence[int]:
        """Segments that may be read, most relevant first."""


def check_retrieval_sizes(name: str, segment: int, tokens: int | None) -> None:
    """Check the sizes of a retrieval.

    Raises:
        BadParameter: a size is below 1.
    """
    if segment < 1:
        raise BadParameter(f"{name}.segment must be at least 1, got {segment}.")
    if tokens is not None and tokens < 1:
        raise BadParameter(f"{name}.tokens must be at least 1, or left out, got {tokens}.")


@dataclass(frozen=True, eq=False)
class SegmentIndex:
    """Segments of a conversation with their embeddings and clusters, computed once.

    Args:
        size: utterances per segment.
    """

    conversation: Conversation
    tokenizer: TokenizerAdapter
    embedder: Embedder
    size: int
    _question_rows: dict[str, Float32[np.ndarray, " D"]] = field(default_factory=dict)
    _clusters: dict[tuple[int, int], SegmentClusters] = field(default_factory=dict)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return cut_segments(self.conversation, SegmentUnit.UTTERANCES, self.size)

    def nearest(self, question: str, among: Sequence[int]) -> list[int]:
        """Segments by similarity, most similar first; ties by position."""
        similarities = self._rows[list(among)] @ self._question(question)
        return [among[index] for index in np.argsort(-similarities, kind="stable").tolist()]

    def episode(self, question: str, count: int, seed: int) -> tuple[int, ...]:
        """Segments of the episode that a question belongs to."""
        if (count, seed) not in self._clusters:
            self._clusters[count, seed] = cluster(self._rows, count, seed)
        clusters = self._clusters[count, seed]
        return clusters.members[match_episode(self._question(question), clusters.centroids).episode]

    def fitting(self, ranked: Sequence[int], tokens: int) -> Conversation:
        """Conversation of at most `tokens` tokens: the segments that fit, in conversation order.

        Raises:
            BudgetError: no segment fits.
        """
        is_chat = self.conversation.form is PromptLayout.CHAT
        left, chosen, opened = tokens - (0 if is_chat else self._frame), list[int](), set[int]()
        for number in ranked:
            new = set(self.segments[number].messages) - opened if is_chat else set[int]()
            cost = self._lengths[number] + len(new) * self._frame
            if cost <= left:
                chosen.append(number)
                opened |= new
                left -= cost
        while chosen:
            selected = self._only(sorted(chosen))
            if len(self.tokenizer.encode_conversation(selected).ids) <= tokens:
                return selected
            chosen.pop()  # joined texts may take a few tokens more
        raise BudgetError(
            f"No segment of {self.size} utterances fits {tokens} tokens: raise the budget, or take "
            "smaller segments."
        )

    def _only(self, chosen: Sequence[int]) -> Conversation:
        """Conversation with only these segments."""
        kept: dict[int, str] = {}
        for number in chosen:
            for span in self.segments[number].spans:
                kept[span.message] = kept.get(span.message, "") + self._text(span)
        messages = [
            Message(source.role, text, source.speaker, source.date)
            for source, text in ((self.conversation.messages[n], t) for n, t in kept.items())
        ]
        return replace(self.conversation, messages=tuple(messages), questions=())

    @cached_property
    def _rows(self) -> Float32[np.ndarray, "N D"]:
        return self.embedder.embed_segments([segment.text for segment in self.segments])

    @cached_property
    def _lengths(self) -> list[int]:
        """Tokens of the text of each segment."""
        return [
            sum(self.tokenizer.count_tokens(self._text(span)) for span in segment.spans)
            for segment in self.segments
        ]

    @cached_property
    def _frame(self) -> int:
        """Tokens around a message; a transcript or a document is one message."""
        empty = replace(self.conversation, messages=(Message("user", ""),), questions=())
        return len(self.tokenizer.encode_conversation(empty).ids)

    def _text(self, span: MessageSpan) -> str:
        return self.conversation.messages[span.message].content[span.start : span.stop]

    def _question(self, text: str) -> Float32[np.ndarray, " D"]:
        if text not in self._question_rows:
            self._question_rows[text] = self.embedder.embed_questions([text])[0]
        return self._question_rows[text]
