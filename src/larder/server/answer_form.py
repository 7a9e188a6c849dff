"""Form of an answer: reasoning, content and tool calls in the text that a model writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from larder.core.errors import UsageError
from larder.server.tool_parsers.base import TOOL_PARSERS, ToolCall, ToolParser
from larder.session.transcript.chat_template import call_mark

THINK_START, THINK_STOP = "<think>", "</think>"
# Whether reasoning begins without its tag, which the chat template has written, by vLLM's names.
TOOL_PARSERS_BY_MARK = ("hermes", "mistral", "llama3_json")
REASONING_PARSERS = {"deepseek_r1": True, "qwen3": False}


@dataclass(frozen=True)
class ParsedAnswer:
    """Parts of an answer.

    Args:
        reasoning: text of the reasoning.
        content: text beside reasoning and calls.
    """

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class AnswerForm:
    """Parsers of an answer, by vLLM's names; none reads all as content.

    Args:
        tool_parser: parser of tool calls; empty for none.
        reasoning_parser: parser of the reasoning; empty for none.
        is_parallel: more than one call is taken.

    Raises:
        UsageError: there is no such parser.
    """

    tool_parser: str = ""
    reasoning_parser: str = ""
    is_parallel: bool = True

    def __post_init__(self) -> None:
        if self.reasoning_parser not in {"", *REASONING_PARSERS}:
            known = ", ".join(REASONING_PARSERS)
            raise UsageError(
                f"There is no reasoning parser {self.reasoning_parser!r}: take one of {known}."
            )
        if self.tool_parser and self.tool_parser not in TOOL_PARSERS:
            known = ", ".join(sorted(TOOL_PARSERS.builtin_names() - {"base"}))
            raise UsageError(
                f"There is no tool call parser {self.tool_parser!r}: take one of {known}."
            )

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        return not (self.tool_parser or self.reasoning_parser)

    @cached_property
    def tools(self) -> ToolParser | None:
        """Parser of tool calls."""
        return TOOL_PARSERS.load(self.tool_parser)() if self.tool_parser else None

    def parse(self, text: str) -> ParsedAnswer:
        """Parts of a whole answer."""
        reasoning, content = self.split_reasoning(text)
        if self.tools is not None:
            start = self.tools.start(content)
            calls = self.tools.calls(content[start:])[: self.max_calls]
            if calls:
                return ParsedAnswer(reasoning, content[:start], calls)
        return ParsedAnswer(reasoning, content)

    def called_tool(self, text: str) -> str:
        """Name of the tool that an answer calls, several joined by `+`; empty without a call."""
        if self.tools is None:
            return ""
        return "+".join(sorted({call.name for call in self.parse(text).calls}))

    @property
    def max_calls(self) -> int | None:
        """Largest number of calls that are taken; None for any."""
        return None if self.is_parallel else 1

    def split_reasoning(self, text: str) -> tuple[str, str]:
        """Reasoning and the text behind it."""
        if not self.reasoning_parser:
            return "", text
        has_start = text.lstrip().startswith(THINK_START)
        if not has_start and not REASONING_PARSERS[self.reasoning_parser]:
            return "", text
        before, _, after = text.partition(THINK_STOP)
        reasoning = before.lstrip().removeprefix(THINK_START) if has_start else before
        return reasoning.strip("\n"), after.lstrip("\n")

    def canonical(self, text: str) -> str:
        """Text of an answer as its client sends it back: without reasoning, calls as marks."""
        if self.is_plain:
            return text.strip()
        parsed = self.parse(text)
        return canonical_answer(parsed.content, parsed.calls)


def default_tool_parser(template: str | Mapping[str, str] | None) -> str:
    """Name of the parser for a chat template; empty if the template has none."""
    text = template if isinstance(template, str) else " ".join((template or {}).values())
    marks = {TOOL_PARSERS.load(name).template_mark: name for name in TOOL_PARSERS_BY_MARK}
    return next((name for mark, name in marks.items() if mark in text), "")


PLAIN_FORM = AnswerForm()


def canonical_answer(content: str, calls: tuple[ToolCall, ...]) -> str:
    """Text of an answer with calls, whatever their spelling was."""
    return content.strip() + "".join(call_mark(call.name, call.arguments) for call in calls)
