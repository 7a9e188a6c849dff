"""Incremental detokenization of one answer, with stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from larder.core.arguments import check_type

REPLACEMENT_CHARACTER = "\ufffd"  # decoded from an incomplete character
# Tokens that the text of a new one may depend on: characters of 1 to 4 bytes fit in it.
CONTEXT_TOKENS = 12


def discard_text(text: str) -> None:
    """`on_text` callback that ignores the text."""
    del text


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """All stop strings of an argument that is one or several.

    Raises:
        BadParameter: it is neither.
    """
    expected = "a string or a list of strings"
    check_type("stop", stop, (str, list, tuple), expected)
    several = (stop,) if isinstance(stop, str) else tuple(stop)
    for one in several:
        check_type("stop", one, str, expected)
    return several


class IncrementalDetokenizer:
    """Incremental detokenizer of one answer; emits text that will not change any more.

    Text is withheld while its last character is incomplete, or while it may be the beginning of a
    stop string. The stop string itself is not emitted.

    The text of a token depends on its neighbors: characters span several tokens, and white space
    depends on context. So the latest tokens are decoded together, and only the text beyond the
    settled ones is new. The cost of a token does not depend on its position, unless a tokenizer
    changes text that it has already decoded: then the whole answer is decoded once more.

    Args:
        decode: text of token ids.
        stops: strings that end the answer.
        on_text: receives every part of the text, in order.
        context: token ids before the answer, whose text is not emitted; it decides the white
            space at the start of the answer.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        on_text: Callable[[str], None],
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._on_text = on_text
        self._ids: list[int] = list(context)
        self._settled, self._tail = "", ""
        self._start = 0  # index of the first of the latest tokens
        self._context = decode(self._ids) if context else ""
        self._before = self._context  # text of the settled ones among them
        self._sent = 0
        self.matched_stop: str | None = None  # the stop string that ended the answer

    @property
    def text(self) -> str:
        """The whole text so far."""
        return self._settled + self._tail

    def push(self, token: int) -> bool:
        """Add one token; returns False once a stop string ends the answer."""
        self._ids.append(token)
        self._read()
        skipped = max(0, len(self._settled) - self._longest)
        near = self._settled[skipped:] + self._tail
        matches = [(near.find(stop), stop) for stop in self._stops if stop in near]
        if matches:
            cut, self.matched_stop = min(matches)
            self._settled, self._tail = self.text[: skipped + cut], ""
            self._send(near[:cut], skipped)
            return False
        self._send(near[: len(near) - self._withheld(near)], skipped)
        if len(self._ids) - self._start >= 2 * CONTEXT_TOKENS:
            self._settle()
        return True

    def finish(self) -> None:
        """Emit the withheld text."""
        self._send(self.text, 0)

    def _read(self) -> None:
        """Decode the latest tokens."""
        shown = self._decode(self._ids[self._start :])
        if shown.startswith(self._before):
            self._tail = shown[len(self._before) :]
        elif not shown.endswith(REPLACEMENT_CHARACTER):  # else the next token completes it
            self._start, self._before, self._settled = 0, self._context, ""
            self._tail = self._decode(self._ids).removeprefix(self._context)

    def _settle(self) -> None:
        """Settle the text so far, if the last tokens alone end in a complete character, too."""
        start = len(self._ids) - CONTEXT_TOKENS
        before = self._decode(self._ids[start:])
        if before and not before.endswith(REPLACEMENT_CHARACTER):
            self._settled, self._tail = self.text, ""
            self._start, self._before = start, before

    def _withheld(self, text: str) -> int:
        """Characters at the end that may still change."""
        whole = text.rstrip(REPLACEMENT_CHARACTER)
        unfinished = len(text) - len(whole)
        for size in range(min(self._longest - 1, len(whole)), 0, -1):
            if any(stop.startswith(whole[-size:]) for stop in self._stops):
                return size + unfinished
        return unfinished

    def _send(self, text: str, start: int) -> None:
        """Emit the new part of a text that begins at `start` in the whole text."""
        if start + len(text) > self._sent:
            self._on_text(text[self._sent - start :])
            self._sent = start + len(text)
