"""Reasoning of a streamed answer, separated from its content."""

from __future__ import annotations

from enum import Enum, auto

from larder.server.answer_form import REASONING_PARSERS, THINK_START, THINK_STOP
from larder.server.tool_parsers.base import marker_start


class _ReasoningStage(Enum):
    """Kind of the next characters."""

    START = auto()
    REASONING = auto()
    GAP = auto()  # line breaks between both
    CONTENT = auto()


class ReasoningStream:
    """Reasoning and content of a streamed answer, each passed on once it is final.

    What is passed on is not parsed again. All parts together are those of
    `AnswerForm.split_reasoning`.

    Args:
        parser: name of the reasoning parser; empty for an answer that is content alone.
    """

    def __init__(self, parser: str) -> None:
        self._parser = parser
        self._stage = _ReasoningStage.START if parser else _ReasoningStage.CONTENT
        self._pending = ""  # characters that are not final
        self._space = ""  # white space before the first of them
        self._is_sent = False  # some of the reasoning

    def push(self, text: str, is_done: bool) -> tuple[str, str]:
        """Reasoning and content that a part makes final.

        Args:
            is_done: the answer has ended.
        """
        if self._stage is _ReasoningStage.START:
            text = self._started(text, is_done)
        reasoning = ""
        if self._stage is _ReasoningStage.REASONING:
            reasoning, text = self._reasoned(text, is_done)
        if self._stage is _ReasoningStage.GAP:
            text = text.lstrip("\n")
            self._stage = _ReasoningStage.CONTENT if text else _ReasoningStage.GAP
        return reasoning, text if self._stage is _ReasoningStage.CONTENT else ""

    def _started(self, text: str, is_done: bool) -> str:
        """Text to continue with once it is known whether the answer begins with reasoning."""
        if not self._pending:
            rest = text.lstrip()
            self._space += text[: len(text) - len(rest)]
            text = rest
        self._pending += text
        if not is_done and THINK_START.startswith(self._pending):
            return ""
        has_tag = self._pending.startswith(THINK_START)
        is_reasoning = has_tag or REASONING_PARSERS[self._parser]
        self._stage = _ReasoningStage.REASONING if is_reasoning else _ReasoningStage.CONTENT
        text, self._pending = self._pending, ""
        return text.removeprefix(THINK_START) if has_tag else self._space + text

    def _reasoned(self, text: str, is_done: bool) -> tuple[str, str]:
        """Reasoning that is final, and the text behind it."""
        text = self._pending + text
        if not self._is_sent:
            text = text.lstrip("\n")
        stop = marker_start(text, THINK_STOP)
        is_closed = text.startswith(THINK_STOP, stop)
        part = text if is_done and not is_closed else text[:stop]
        reasoning = part.rstrip("\n")
        self._is_sent = self._is_sent or bool(reasoning)
        if is_closed:
            self._stage, self._pending = _ReasoningStage.GAP, ""
            return reasoning, text[stop + len(THINK_STOP) :]
        self._pending = text[len(reasoning) :]
        return reasoning, ""
