"""Log-probabilities of tokens in the JSON of both completion endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from larder.server.http.streaming import Logprobs
from larder.server.request import TokenLogprob


def chat_logprobs(logprobs: Logprobs, start: int) -> dict[str, Any]:
    """Log-probabilities in the form of chat completions.

    Args:
        start: not used; `text_logprobs` has it.
    """
    content = [
        _chat_token(each) | {"top_logprobs": [_chat_token(other) for other in each.top]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(logprobs: Logprobs, start: int) -> dict[str, Any]:
    """Log-probabilities in the form of completions.

    Tokens of the same text are one name, with the larger number. The token itself is always among
    the most likely ones, unless it is the first of a text, which has none.

    Args:
        start: character at which the first token begins.
    """
    ends = accumulate((len(each.text) for each in logprobs), initial=start)
    return {
        "tokens": [each.text for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [_ranked(each) for each in logprobs],
        "text_offset": list(ends)[:-1],
    }


def _chat_token(logprob: TokenLogprob) -> dict[str, Any]:
    return {"token": logprob.text, "logprob": logprob.logprob, "bytes": list(logprob.data)}


def _ranked(logprob: TokenLogprob) -> dict[str, float] | None:
    if logprob.logprob is None:
        return None
    ranked: dict[str, float] = {}
    for text, number in _numbered(logprob):
        ranked[text] = max(number, ranked.get(text, number))
    return ranked


def _numbered(logprob: TokenLogprob) -> Iterator[tuple[str, float]]:
    for each in (*logprob.top, logprob):
        if each.logprob is not None:
            yield each.text, each.logprob
