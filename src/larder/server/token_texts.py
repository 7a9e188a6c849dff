"""The text of each token, so that a map of positions can be laid over what was said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT_CHARACTER = "\ufffd"  # what a tokenizer writes for bytes that are no whole character
MAX_CHARACTER_TOKENS = 4  # tokens that a character is spread over


class TokenTexts:
    """Texts of token ids, each looked up once. Not safe from threads.

    Args:
        decode: the text of token ids, without special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """One text per token; of tokens that share a character, the last one has it."""
        texts = [self._text(token) for token in ids]
        start = 0
        while start < len(texts):
            if REPLACEMENT_CHARACTER in texts[start]:
                start = self._mend(texts, ids, start)
            start += 1
        return tuple(texts)

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def _mend(self, texts: list[str], ids: Sequence[int], start: int) -> int:
        """Join tokens from here on until they make whole characters; the last that was joined."""
        for stop in range(start + 2, min(start + MAX_CHARACTER_TOKENS, len(ids)) + 1):
            text = self._decode(list(ids[start:stop]))
            if REPLACEMENT_CHARACTER not in text:
                texts[start:stop] = [""] * (stop - start - 1) + [text]
                return stop - 1
        return start
