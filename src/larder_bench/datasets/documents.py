"""One long document and one question, as public data sets have them."""

from __future__ import annotations

import re
from collections.abc import Callable

from larder.core.conversation import Conversation, PromptLayout, Question
from larder.core.errors import BadParameter
from larder.session.files.loader import read_document
from larder.session.transcript.tokenizer_adapter import ACKNOWLEDGEMENT
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.sources import TaskSources


def document_conversation(
    name: str,
    text: str,
    question: Question,
    tokens: int,
    sources: TaskSources,
    opening: str = "",
    question_prompt: str = "{question}",
) -> Conversation:
    """A document of at most `tokens` tokens, its middle left out where it is longer.

    Args:
        name: of the conversation; its first part is that of the task.

    Raises:
        BadParameter: there is no room for anything.
    """
    count = sources.count_tokens
    room = tokens - count(opening) - count(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
    if room < 2:
        task = name.partition("-")[0]
        raise BadParameter(f"{task}.tokens must hold a document, got {tokens}: take more.")
    document = read_document(truncate_middle(text, room, count), name)
    return Conversation(
        name, document.messages, (question,), PromptLayout.DOCUMENT, opening, question_prompt
    )


# Languages without spaces have no words that could be told apart.
WORDS = re.compile(r"\s*\S{1,16}")
LETTERS_PER_TOKEN = 16
BLOCK = 256  # words counted at once


def head_tokens(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest beginning of at most `tokens` tokens, or nearly so."""
    pieces = WORDS.findall(text[: max(0, tokens) * LETTERS_PER_TOKEN])
    fitting = _count_fitting(lambda n, m: "".join(pieces[n:m]), len(pieces), tokens, count_tokens)
    return "".join(pieces[:fitting])


def tail_tokens(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The longest end of at most `tokens` tokens, or nearly so."""
    start = max(0, len(text) - max(0, tokens) * LETTERS_PER_TOKEN)
    pieces = WORDS.findall(text[start:])
    last = len(pieces)
    fitting = _count_fitting(
        lambda n, m: "".join(pieces[last - m : last - n]), last, tokens, count_tokens
    )
    return "".join(pieces[last - fitting :]).lstrip()


def truncate_middle(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The text, or if it is too long its beginning and its end, half of the tokens each."""
    if len(text) <= tokens * LETTERS_PER_TOKEN and count_tokens(text) <= tokens:
        return text
    half = (tokens - 1) // 2
    return f"{head_tokens(text, half, count_tokens)}\n{tail_tokens(text, half, count_tokens)}"


def _count_fitting(
    joined: Callable[[int, int], str], pieces: int, tokens: int, count_tokens: Callable[[str], int]
) -> int:
    """How many pieces fit, found in steps that halve where one is too long.

    Steps are counted apart, which may come to more than the whole, and in no known tokenizer to
    less.
    """
    fitting, step = 0, BLOCK
    while step and fitting < pieces:
        stop = min(pieces, fitting + step)
        taken = count_tokens(joined(fitting, stop))
        if taken <= tokens:
            tokens -= taken
            fitting = stop
        else:
            step //= 2
    return fitting
