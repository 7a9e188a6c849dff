"""Tool calls of an answer that comes in parts: names first, then arguments as they are written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from larder.server.tool_parsers.base import ToolParser, call_head, json_call

HEAD_CHARS = 1024  # within which a call must name its tool for its arguments to be streamed
OUTSIDE, INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')  # of strings


@dataclass(frozen=True)
class CallDelta:
    """Part of a call.

    Args:
        index: number of the call in its answer.
        name: of the tool; empty behind the first part.
        arguments: next characters of the arguments; empty in the first part.
    """

    index: int
    name: str
    arguments: str


class CallStream:
    """Calls of an answer that comes in parts.

    Arguments are passed on as soon as the name and the beginning of the arguments are there, before
    anyone knows whether what follows is JSON. Where it is not, the call stays broken off, as
    OpenAI's own streams do. In forms without `next_call`, and where the arguments stand before the
    name, calls are passed on whole.

    Args:
        parser: of the form of the calls.
        max_calls: largest number of calls; None for any.
    """

    def __init__(self, parser: ToolParser, max_calls: int | None = None) -> None:
        self._parser, self._max_calls = parser, max_calls
        self._place = 0  # end of the last whole call
        self._object: ObjectScanner | None = None  # of the open call, from its first character
        self._arguments: ObjectScanner | None = None  # of the open call
        self._seen_len = 0
        self.num_calls = 0

    def push(self, text: str, is_done: bool) -> list[CallDelta]:
        """Parts that a longer text adds.

        Args:
            text: the answer so far, without reasoning.
            is_done: the answer has ended.
        """
        deltas = list[CallDelta]()
        while self._has_more(text) and self._step(text, deltas):
            pass
        self._seen_len = len(text)
        if is_done and not self.num_calls:  # also forms that are not streamed
            calls = self._parser.calls(text[self._parser.start(text) :])
            for call in calls[: self._max_calls]:
                deltas += self._whole(call.name, call.text)
        return deltas

    def _has_more(self, text: str) -> bool:
        is_full = self._max_calls is not None and self.num_calls >= self._max_calls
        return self._arguments is not None or not is_full

    def _step(self, text: str, deltas: list[CallDelta]) -> bool:
        """Take what there is of one call; True if it is whole."""
        start = self._parser.next_call(text, self._place)
        if start is None or start == len(text):
            return False
        self._object = self._object or ObjectScanner(start)
        if self._object.is_done:  # and was no call
            return False
        if self._arguments is None and self._seen_len < start + HEAD_CHARS:
            head = call_head(text, start)
            if head is not None:
                deltas.append(CallDelta(self.num_calls, head[0], ""))
                self._arguments = ObjectScanner(head[1])
                self.num_calls += 1
        if self._arguments is not None:
            if part := self._arguments.push(text):
                deltas.append(CallDelta(self.num_calls - 1, "", part))
        self._object.push(text)
        call = json_call(text, start) if self._object.is_done else None  # decoded once
        if call is None:
            return False
        if self._arguments is None:
            deltas += self._whole(call[0].name, call[0].text)
        self._object, self._arguments, self._place = None, None, call[1]
        return True

    def _whole(self, name: str, arguments: str) -> list[CallDelta]:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        return [CallDelta(index, name, ""), CallDelta(index, "", arguments)]


class ObjectScanner:
    """Scanner that finds where a JSON object ends, in a text that grows.

    Args:
        place: index of the first brace.
    """

    def __init__(self, place: int) -> None:
        self._place, self._depth, self._is_string = place, 0, False
        self.is_done = False

    def push(self, text: str) -> str:
        """Characters of the object that were not there before."""
        start = self._place
        while not self.is_done and self._place < len(text):
            found = (INSIDE if self._is_string else OUTSIDE).search(text, self._place)
            if found is None:
                self._place = len(text)
            elif not self._pass(found[0], found.end(), len(text)):
                break
        return text[start : self._place]

    def _pass(self, sign: str, end: int, text_len: int) -> bool:
        """Go behind a sign; False if the escaped one behind a backslash is still to come."""
        if sign == "\\":
            end += 1
            if end > text_len:
                self._place = end - 2
                return False
        elif sign == '"':
            self._is_string = not self._is_string
        else:
            self._depth += 1 if sign in "{[" else -1
            self.is_done = self._depth == 0
        self._place = end
        return True
