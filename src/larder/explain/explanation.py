"""Data of the explain page, in plain numbers and text.

    Explanation             one conversation after its prefill
    ├── PageMessage        role, speaker, date, and the text token by token
    ├── PageEpisode        one cache: entries kept by token, layer and head
    └── PageAnswer         question, answer, and the episode that answered

The module does not depend on tensors: its callers convert them to tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from larder.core.errors import BadParameter


@dataclass(frozen=True)
class PageMessage:
    """One message as tokens.

    Args:
        role: `system`, `user` or `assistant`. System messages are shown as headings.
        speaker: a person's name; empty shows the role.
        date: a date that differs from the previous message's starts a new session.
        tokens: the text of each token, joined they are the message (see `token_texts`).
        lead_tokens: number of chat template tokens at the start, shown as marks.
        tail_tokens: number of chat template tokens at the end.
    """

    role: str
    speaker: str
    date: str
    tokens: tuple[str, ...]
    lead_tokens: int = 0
    tail_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.lead_tokens, self.tail_tokens) < 0:
            raise BadParameter("PageMessage.lead_tokens and tail_tokens must be at least 0.")
        if self.lead_tokens + self.tail_tokens > len(self.tokens):
            raise BadParameter(
                f"PageMessage.lead_tokens + tail_tokens must be at most its {len(self.tokens)} "
                f"tokens, got {self.lead_tokens} + {self.tail_tokens}."
            )


@dataclass(frozen=True)
class PageEpisode:
    """One cache of the conversation; a policy without episodes has exactly one.

    Args:
        name: a few words, such as the topic.
        kept_heads: for each token of the transcript, how many (layer, kv head) pairs keep it.
        kept_lengths: entries kept, layer by kv head.
        segments: the conversation segments of the scoring prompt.
        topics: further words for the episode.
        kept_by_layer: layer by token, how many kv heads of the layer keep it; empty if unknown.
    """

    name: str
    kept_heads: tuple[int, ...]
    kept_lengths: tuple[tuple[int, ...], ...]
    segments: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    kept_by_layer: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        heads = sum(len(row) for row in self.kept_lengths)
        if any(not 0 <= count <= heads for count in self.kept_heads):
            raise BadParameter(
                f"PageEpisode.kept_heads must lie in [0, {heads}], the pairs in kept_lengths, "
                f"got {min(self.kept_heads)} to {max(self.kept_heads)}."
            )
        if self.kept_by_layer:
            self._check_layers()

    def _check_layers(self) -> None:
        if len(self.kept_by_layer) != len(self.kept_lengths):
            raise BadParameter(
                f"PageEpisode.kept_by_layer must have {len(self.kept_lengths)} layers like "
                f"kept_lengths, got {len(self.kept_by_layer)}."
            )
        if any(len(row) != len(self.kept_heads) for row in self.kept_by_layer):
            raise BadParameter(
                f"Each layer of PageEpisode.kept_by_layer must have {len(self.kept_heads)} "
                "tokens like kept_heads."
            )
        if any(min(row, default=0) < 0 for row in self.kept_by_layer) or (
            tuple(map(sum, zip(*self.kept_by_layer, strict=True))) != self.kept_heads
        ):
            raise BadParameter("PageEpisode.kept_by_layer must sum over layers to kept_heads.")


@dataclass(frozen=True)
class PageAnswer:
    """Question and its answer.

    Args:
        expected: the known answer; empty if there is none.
        episode: index of the episode that answered.
        exact: result of `exact_match` against `expected`; None without an expected answer.
    """

    question: str
    answer: str
    expected: str = ""
    episode: int = 0
    exact: bool | None = None


@dataclass(frozen=True)
class Explanation:
    """Conversation, the entries its caches keep, and the answers from them.

    Args:
        title: such as the file's name.
        model: the model's name.
        policy: canonical spelling of the policy.
        context_tokens: prefilled tokens.
        budget_tokens: entries per kv head, on average over heads.
        full_kv_bytes: size of a cache that keeps every entry.
        kv_bytes: size of all episodes' caches.
        active_kv_bytes: size of the active episode's cache.
        peak_kv_bytes: peak over prefill and answers.
        messages: the transcript in order.
        episodes: at least one; all have the same tokens, layers and heads.
        answers: in the order asked; the first one's episode is shown at the start.
        sliding_layers: layers with a sliding window, independent of the policy.
        recalled_by: name of the policy's recall part; empty without recall.
    """

    title: str
    model: str
    policy: str
    context_tokens: int
    budget_tokens: int
    full_kv_bytes: int
    kv_bytes: int
    active_kv_bytes: int
    peak_kv_bytes: int
    messages: tuple[PageMessage, ...]
    episodes: tuple[PageEpisode, ...]
    answers: tuple[PageAnswer, ...] = ()
    sliding_layers: tuple[int, ...] = ()
    recalled_by: str = ""

    @property
    def heads_total(self) -> int:
        """Number of (layer, kv head) pairs, the most that can keep one token."""
        return sum(self.heads_per_layer)

    @property
    def heads_per_layer(self) -> tuple[int, ...]:
        """Kv heads of each layer."""
        return tuple(len(row) for row in self.episodes[0].kept_lengths)

    def __post_init__(self) -> None:
        if not self.episodes:
            raise BadParameter("Explanation.episodes must hold at least one episode, got none.")
        self._check_episodes()
        for answer in self.answers:
            if not 0 <= answer.episode < len(self.episodes):
                raise BadParameter(
                    f"PageAnswer.episode must lie in [0, {len(self.episodes)}), "
                    f"got {answer.episode}."
                )
        if any(not 0 <= layer < len(self.heads_per_layer) for layer in self.sliding_layers):
            raise BadParameter(
                f"Explanation.sliding_layers must lie in [0, {len(self.heads_per_layer)}), "
                f"got {self.sliding_layers}."
            )

    def _check_episodes(self) -> None:
        tokens = sum(len(message.tokens) for message in self.messages)
        for index, episode in enumerate(self.episodes):
            if len(episode.kept_heads) != tokens:
                raise BadParameter(
                    f"PageEpisode.kept_heads must have one count for each of the {tokens} tokens "
                    f"in messages, got {len(episode.kept_heads)} in episode {index}."
                )
            if tuple(len(row) for row in episode.kept_lengths) != self.heads_per_layer:
                raise BadParameter(
                    "PageEpisode.kept_lengths must have the same layers and heads in every "
                    f"episode, {self.heads_per_layer} heads per layer, unlike episode {index}."
                )


def token_texts(text: str, starts: Sequence[int]) -> tuple[str, ...]:
    """Text of each token; joined, they are the whole text.

    Byte-level tokenizers split a rare character over several tokens, which then share one offset:
    the last of them gets the character and the others an empty text. Text between two tokens
    (a space that the tokenizer skips) belongs to the earlier one, text before all to the first.

    Args:
        text: the text that was tokenized.
        starts: the first character of each token, ascending, as a tokenizer's offsets give them.

    Raises:
        BadParameter: the starts descend or leave the text, or there is text but no token.
    """
    if not starts:
        if text:
            raise BadParameter(f"token_texts needs a token for {len(text)} characters, got none.")
        return ()
    edges = (0, *starts[1:], len(text))
    if starts[0] < 0 or any(start > stop for start, stop in pairwise((*starts, len(text)))):
        raise BadParameter(
            f"token_texts.starts must ascend within [0, {len(text)}], got {tuple(starts)}."
        )
    return tuple(text[start:stop] for start, stop in pairwise(edges))
