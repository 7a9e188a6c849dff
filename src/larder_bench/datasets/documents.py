"""One long document and one question, as public data sets have them, in the layout of a wording."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from larder.core import BadParameter, Conversation, Question
from larder.session import ACKNOWLEDGEMENT, read_document
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import worded_document
from larder_bench.datasets.sources import TaskSources

# Languages without spaces have no separate words.
WORDS = re.compile(r"\s*\S{1,16}")
LETTERS_PER_TOKEN = 16
BLOCK = 256  # words counted at once


def document_conversation(
    name: str,
    text: str,
    question: Question,
    tokens: int,
    sources: TaskSources,
    opening: str = "",
    question_prompt: str = "{question}",
) -> Conversation:
    """Conversation about a document of at most `tokens` tokens; a longer text loses its middle.

    Args:
        name: name of the conversation; its first part is the task's name.
        question_prompt: format string with `{question}`.

    Raises:
        BadParameter: no text fits.
    """
    count = sources.count_tokens
    max_tokens = tokens - count(opening) - count(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
    if max_tokens < 2:
        task = name.partition("-")[0]
        raise BadParameter(f"{task}.tokens must hold a document, got {tokens}: take more.")
    document = read_document(truncate_middle(text, max_tokens, count), name)
    document = replace(
        document, questions=(question,), opening=opening, question_prompt=question_prompt
    )
    return worded_document(document, sources.wording)


def head_tokens(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Longest beginning of at most `tokens` tokens, approximately."""
    words = WORDS.findall(text[: max(0, tokens) * LETTERS_PER_TOKEN])
    fitting = _count_fitting(lambda n, m: "".join(words[n:m]), len(words), tokens, count_tokens)
    return "".join(words[:fitting])


def tail_tokens(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Longest end of at most `tokens` tokens, approximately."""
    start = max(0, len(text) - max(0, tokens) * LETTERS_PER_TOKEN)
    words = WORDS.findall(text[start:])
    last = len(words)
    fitting = _count_fitting(
        lambda n, m: "".join(words[last - m : last - n]), last, tokens, count_tokens
    )
    return "".join(words[last - fitting :]).lstrip()


def truncate_middle(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Text, or if it is too long its beginning and its end, half of the tokens each."""
    if len(text) <= tokens * LETTERS_PER_TOKEN and count_tokens(text) <= tokens:
        return text
    half = (tokens - 1) // 2
    return f"{head_tokens(text, half, count_tokens)}\n{tail_tokens(text, half, count_tokens)}"


def _count_fitting(
    join: Callable[[int, int], str], words: int, tokens: int, count_tokens: Callable[[str], int]
) -> int:
    """Number of words that fit, found in blocks whose size is halved if one is too long.

    Blocks are counted separately, which may give more tokens than the whole text, but with no known
    tokenizer fewer.
    """
    fitting, step = 0, BLOCK
    while step and fitting < words:
        stop = min(words, fitting + step)
        taken = count_tokens(join(fitting, stop))
        if taken <= tokens:
            tokens -= taken
            fitting = stop
        else:
            step //= 2
    return fitting
