"""Conversion of a question run into the plain data of the explain page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from jaxtyping import Int

from larder.cache.sequence import SequenceCache
from larder.cli.question_run import QuestionOutcome, QuestionRun
from larder.core.conversation import Conversation, Message, PromptLayout
from larder.core.registry import public_name
from larder.explain import Explanation, PageAnswer, PageEpisode, PageMessage, token_texts
from larder.session.episodes.clustering import episode_keywords
from larder.session.transcript.tokenizer_adapter import ACKNOWLEDGEMENT

DEFAULT_EPISODE_NAME = "everything"  # of a single cache, or of an episode without keywords


def explanation(run: QuestionRun) -> Explanation:
    """Explanation of a run.

    Activates the cache of each episode in turn; the last one stays active.
    """
    memory, spec = run.memory, run.engine.loaded.decoder.spec
    figures, recall = memory.figures, memory.policy.recall
    return Explanation(
        title=memory.conversation.name,
        model=run.engine.loaded.name,
        policy=str(memory.policy),
        context_tokens=figures.context_tokens,
        budget_tokens=figures.budget_tokens,
        full_kv_bytes=figures.full_kv_bytes,
        kv_bytes=figures.kv_bytes,
        active_kv_bytes=figures.active_kv_bytes,
        peak_kv_bytes=run.peak_kv_bytes,
        messages=_messages(run),
        episodes=_episodes(run),
        answers=tuple(_answer(outcome) for outcome in run.outcomes if outcome.answer is not None),
        sliding_layers=tuple(
            layer.index for layer in spec.layers if layer.sliding_window is not None
        ),
        recalled_by="" if recall is None else public_name(type(recall)),
    )


def _episodes(run: QuestionRun) -> tuple[PageEpisode, ...]:
    memory = run.memory
    prompts = memory.router.prompts() or [()]
    words = episode_keywords([" ".join(texts) for texts in prompts])
    return tuple(
        _episode(memory.caches.activate(index), memory.figures.context_tokens, texts, about)
        for index, (texts, about) in enumerate(zip(prompts, words, strict=True))
    )


def _episode(
    cache: SequenceCache, tokens: int, texts: Sequence[str], about: Sequence[str]
) -> PageEpisode:
    layers = [_kept_heads(cache, layer.index, tokens) for layer in cache.spec.layers]
    return PageEpisode(
        name=about[0] if about else DEFAULT_EPISODE_NAME,
        kept_heads=tuple(np.sum(layers, axis=0).tolist()),
        kept_lengths=cache.lengths(),
        segments=tuple(texts),
        topics=tuple(about[1:]),
        kept_by_layer=tuple(tuple(layer.tolist()) for layer in layers),
    )


def _kept_heads(cache: SequenceCache, layer: int, tokens: int) -> Int[np.ndarray, " tokens"]:
    """Number of kv heads of a layer that keep each token."""
    positions = cache.entries(layer).packed_positions().cpu().numpy()
    return np.bincount(positions, minlength=tokens)


def _answer(outcome: QuestionOutcome) -> PageAnswer:
    answer = outcome.answer
    assert answer is not None  # the caller left failures out
    return PageAnswer(
        question=answer.question,
        answer=answer.text,
        expected=outcome.question.answer,
        episode=answer.episode or 0,
        exact=None if outcome.scores is None else outcome.scores.exact,
    )


def _messages(run: QuestionRun) -> tuple[PageMessage, ...]:
    """Transcript cut into messages; every token of the context is in exactly one."""
    conversation, transcript = run.memory.conversation, run.memory.transcript
    text, starts = run.engine.tokenizer.render_conversation(conversation)
    tokens = token_texts(text, starts)
    last = transcript.spans[-1][1]
    stops = [stop for _, stop in transcript.spans]
    if conversation.form is PromptLayout.CHAT:
        stops[-1] = len(tokens)  # tokens that close the last turn
    cut = [tokens[start:stop] for start, stop in pairwise([0, *stops])]
    shown = [
        _message(m, own) for m, own in zip(_messages_with_dates(conversation), cut, strict=True)
    ]
    if conversation.form is not PromptLayout.CHAT and last < len(tokens):
        shown.append(
            _message(Message("assistant", ACKNOWLEDGEMENT, date=shown[-1].date), tokens[last:])
        )
    if conversation.opening:
        shown = _with_opening(conversation, shown)
    return tuple(shown)


def _messages_with_dates(conversation: Conversation) -> Iterator[Message]:
    """Messages, each with the latest date in the text that the model reads.

    Some sources date every message; a session starts only where a date is in the text.
    """
    date = ""
    for message in conversation.messages:
        date = message.date if message.date in message.content else date
        yield replace(message, date=date)


def _message(message: Message, tokens: tuple[str, ...]) -> PageMessage:
    """Message with the counts of template tokens before and after its content."""
    content, joined = message.content.strip(), "".join(tokens)
    begin = joined.find(content)
    lead, tail = 0, 0
    if begin >= 0:
        ends = list(accumulate(len(token) for token in tokens))
        lead = sum(end <= begin for end in ends)
        tail = sum(
            end - len(p) >= begin + len(content) for end, p in zip(ends, tokens, strict=True)
        )
    tail = min(tail, len(tokens) - lead)
    return PageMessage(message.role, message.speaker, message.date, tokens, lead, tail)


def _with_opening(conversation: Conversation, messages: list[PageMessage]) -> list[PageMessage]:
    """Messages with the transcript's opening as its own message, split from the first one."""
    first = messages[0]
    opening = Message("user", conversation.opening)
    lead, rest = first.tokens[: first.lead_tokens], first.tokens[first.lead_tokens :]
    return [
        _message(opening, lead),
        PageMessage(first.role, first.speaker, first.date, rest, 0, first.tail_tokens),
        *messages[1:],
    ]
