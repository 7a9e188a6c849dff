"""Tool calls of an answer that comes in parts: names first, then arguments as they are written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from larder.server.tool_parsers.base import ToolParser, call_head, json_call

HEAD_CHARS = 1024  # within which a call must name its tool for its arguments to be streamed
MARKER_CHARS = 64  # more than any beginning of a call that may still turn out to be content
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


class _CallStage(Enum):
    """Kind of the next characters."""

    CONTENT = auto()  # or the beginning of the first call
    CALL = auto()
    SEARCH = auto()  # text between calls
    END = auto()  # calls that are not streamed, or text behind the last call


class CallStream:
    """Content and calls of an answer that comes in parts.

    Content is passed on as soon as it cannot be a call any more, arguments as soon as the name and
    the beginning of the arguments are there, before anyone knows whether what follows is JSON.
    Where it is not, the call stays broken off, as OpenAI's own streams do. In forms without
    `first_call`, and where the arguments stand before the name, calls are passed on whole. No
    character is parsed more often than a fixed number of times.

    Args:
        parser: of the form of the calls.
        max_calls: largest number of calls; None for any.
    """

    def __init__(self, parser: ToolParser, max_calls: int | None = None) -> None:
        self._parser, self._max_calls = parser, max_calls
        self._stage, self._has_content = _CallStage.CONTENT, False
        self._pending = ""  # characters not yet sent
        self._withheld = list[str]()  # text from the first call on, while there is no call
        self._call = list[str]()  # JSON of the open call
        self._call_len = 0
        self._object, self._arguments = ObjectScanner(), None
        self.num_calls = 0

    @property
    def is_broken(self) -> bool:
        """True if the arguments of the last call have started and are not, or not yet, a call."""
        return self._arguments is not None

    def push(self, text: str, is_done: bool) -> tuple[str, list[CallDelta]]:
        """Content and parts of calls that a part of the answer adds.

        Args:
            text: next characters of the answer, without reasoning.
            is_done: the answer has ended.
        """
        content, deltas = "", list[CallDelta]()
        if self._stage is not _CallStage.CONTENT and not self.num_calls:
            self._withheld.append(text)
        self._pending += text
        if self._stage is _CallStage.CONTENT and self._pending:
            content = self._take_content()
        while self._step(deltas):
            pass
        if is_done and not self.num_calls:
            content += self._finish(deltas)
        return content, deltas

    def _take_content(self) -> str:
        """Content up to what may be the first call."""
        parser = self._parser
        find = parser.later_start if self._has_content else parser.start
        start = find(self._pending)
        content, self._pending = self._pending[:start], self._pending[start:]
        self._has_content = self._has_content or bool(content)
        opening = parser.first_call(self._pending, 0) if self._pending else None
        if opening is None:
            if len(self._pending) > MARKER_CHARS:
                self._withheld, self._stage = [self._pending], _CallStage.END
        elif opening.is_found:
            self._withheld = [self._pending]
            self._open(opening.start)
        return content

    def _open(self, start: int) -> None:
        """Begin a call whose JSON begins at an index of the pending text."""
        self._pending = self._pending[start:]
        self._stage = _CallStage.CALL if self._pending.startswith("{") else _CallStage.END
        self._call, self._call_len, self._object = [], 0, ObjectScanner()

    def _step(self, deltas: list[CallDelta]) -> bool:
        """Parse what has arrived of a call or the text behind it; True if the stage changed."""
        if self._stage is _CallStage.CALL:
            return self._take_call(deltas)
        if self._stage is _CallStage.SEARCH:
            opening = self._parser.later_call(self._pending, 0)
            if opening is not None and opening.is_found:
                self._open(opening.start)
                return True
            self._pending = "" if opening is None else self._pending[opening.start :]
            self._stage = _CallStage.END if opening is None else _CallStage.SEARCH
        elif self._stage is _CallStage.END:
            self._pending = ""
        return False

    def _take_call(self, deltas: list[CallDelta]) -> bool:
        stop = self._object.push(self._pending)
        part, self._pending = self._pending[:stop], self._pending[stop:]
        self._call.append(part)
        self._stream_arguments(part, deltas)
        self._call_len += len(part)
        if not self._object.is_done:
            return False
        call = json_call("".join(self._call), 0)  # decoded once
        self._stage = _CallStage.END if call is None else _CallStage.SEARCH
        if call is not None:
            if self._arguments is None:
                deltas += self._whole(call[0].name, call[0].text)
            self._arguments = None
            if self.num_calls == self._max_calls:
                self._stage = _CallStage.END
        return True

    def _stream_arguments(self, part: str, deltas: list[CallDelta]) -> None:
        """Pass on the name of the open call once it is known, and the arguments behind it."""
        if self._arguments is None and self._call_len < HEAD_CHARS:
            text = "".join(self._call)
            head = call_head(text, 0)
            if head is not None:
                deltas.append(CallDelta(self.num_calls, head[0], ""))
                self._arguments, part = ObjectScanner(), text[head[1] :]
                self.num_calls += 1
        if self._arguments is not None and (new := part[: self._arguments.push(part)]):
            deltas.append(CallDelta(self.num_calls - 1, "", new))

    def _finish(self, deltas: list[CallDelta]) -> str:
        """Take calls that are not streamed; content if there are none."""
        is_open = self._stage is _CallStage.CONTENT
        text = self._pending if is_open else "".join(self._withheld)
        calls = self._parser.calls(text)[: self._max_calls]
        for call in calls:
            deltas += self._whole(call.name, call.text)
        return "" if calls else text

    def _whole(self, name: str, arguments: str) -> list[CallDelta]:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        return [CallDelta(index, name, ""), CallDelta(index, "", arguments)]


class ObjectScanner:
    """Scanner that finds where a JSON object ends, in a text that comes in parts."""

    def __init__(self) -> None:
        self._depth, self._is_string, self._is_escaped = 0, False, False
        self.is_done = False

    def push(self, text: str) -> int:
        """Number of first characters of the next part that belong to the object."""
        offset = 0
        while not self.is_done and offset < len(text):
            if self._is_escaped:
                offset, self._is_escaped = offset + 1, False
                continue
            found = (INSIDE if self._is_string else OUTSIDE).search(text, offset)
            if found is None:
                return len(text)
            self._pass(found[0])
            offset = found.end()
        return offset

    def _pass(self, sign: str) -> None:
        """Go behind a sign."""
        if sign == "\\":
            self._is_escaped = True
        elif sign == '"':
            self._is_string = not self._is_string
        else:
            self._depth += 1 if sign in "{[" else -1
            self.is_done = self._depth == 0
