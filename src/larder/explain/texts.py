"""The text of each token, cut so that the pieces join to the whole again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from larder.core.errors import BadParameter


def token_texts(text: str, starts: Sequence[int]) -> tuple[str, ...]:
    """Cut a text into one piece per token, losing and repeating nothing.

    Byte-level tokenizers split a rare character over several tokens, which then share one offset:
    the last of them gets the character and the others an empty text. What lies between two tokens
    (a space that the tokenizer skips) goes to the earlier one, what lies before all to the first.

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
