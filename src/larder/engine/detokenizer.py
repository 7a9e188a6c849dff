"""Text as it comes: token ids turned into readable pieces, and stop strings found in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT_CHARACTER = "\ufffd"  # what a tokenizer shows for half a character
CONTEXT_TOKENS = (
    12  # tokens that the text of a new one may depend on: characters of 1 to 4 bytes fill it
)


class IncrementalDetokenizer:
    """Collects one answer's tokens and hands on text that will not change any more.

    A piece is held back while its last character is unfinished, or while it may be the beginning of
    a stop string. The stop string itself is not handed on.

    What a token says depends on its neighbors: characters are spread over several, and white space
    comes and goes. So the latest tokens are decoded together, and only what they say beyond those
    that were settled is new. A token costs the same wherever in an answer it stands, unless a
    tokenizer takes back what it has shown: then all is decoded once more.

    Args:
        decode: text of token ids.
        stops: strings that end the answer.
        on_text: told of every piece, in order.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        on_text: Callable[[str], None],
    ) -> None:
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._on_text = on_text
        self._ids: list[int] = []
        self._settled, self._tail = "", ""
        self._start = 0  # where the latest tokens begin
        self._before = ""  # what the settled ones of them say
        self._sent = 0

    @property
    def text(self) -> str:
        """All that was said."""
        return self._settled + self._tail

    def push(self, token: int) -> bool:
        """Take one more token; returns whether the answer goes on."""
        self._ids.append(token)
        self._read()
        skipped = max(0, len(self._settled) - self._longest)
        near = self._settled[skipped:] + self._tail
        cut = min((near.find(stop) for stop in self._stops if stop in near), default=-1)
        if cut >= 0:
            self._settled, self._tail = self.text[: skipped + cut], ""
            self._send(near[:cut], skipped)
            return False
        self._send(near[: len(near) - self._withheld(near)], skipped)
        if len(self._ids) - self._start >= 2 * CONTEXT_TOKENS:
            self._settle()
        return True

    def finish(self) -> None:
        """Hand on what was held back."""
        self._send(self.text, 0)

    def _read(self) -> None:
        """Decode the latest tokens."""
        shown = self._decode(self._ids[self._start :])
        if shown.startswith(self._before):
            self._tail = shown[len(self._before) :]
        elif not shown.endswith(
            REPLACEMENT_CHARACTER
        ):  # else what was whole is so again with the next one
            self._start, self._before, self._settled = 0, "", ""
            self._tail = self._decode(self._ids)

    def _settle(self) -> None:
        """Have what was said stay, if the last tokens alone end in a whole character, too."""
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

    def _send(self, text: str, place: int) -> None:
        """Hand on what is new of a text that stands there in the whole."""
        if place + len(text) > self._sent:
            self._on_text(text[self._sent - place :])
            self._sent = place + len(text)
