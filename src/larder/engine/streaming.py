"""Text as it comes: token ids turned into readable pieces, and stop strings found in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what a tokenizer shows for half a character


class TextStream:
    """Collects one answer's tokens and hands on text that will not change any more.

    A piece is held back while its last character is unfinished, or while it may be the beginning of
    a stop string. The stop string itself is not handed on.

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
        self._on_text = on_text
        self._ids: list[int] = []
        self._sent = 0
        self.text = ""

    def push(self, token: int) -> bool:
        """Take one more token; returns whether the answer goes on."""
        self._ids.append(token)
        text = self._decode(self._ids)
        cut = min((text.find(stop) for stop in self._stops if stop in text), default=-1)
        if cut >= 0:
            self.text = text[:cut]
            self._send(len(self.text))
            return False
        self.text = text
        self._send(len(text) - self._withheld(text))
        return True

    def finish(self) -> None:
        """Hand on what was held back."""
        self._send(len(self.text))

    def _withheld(self, text: str) -> int:
        """Characters at the end that may still change."""
        whole = text.rstrip(UNFINISHED)
        unfinished = len(text) - len(whole)
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(whole)), 0, -1):
            if any(stop.startswith(whole[-size:]) for stop in self._stops):
                return size + unfinished
        return unfinished

    def _send(self, upto: int) -> None:
        if upto > self._sent:
            self._on_text(self.text[self._sent : upto])
            self._sent = upto
