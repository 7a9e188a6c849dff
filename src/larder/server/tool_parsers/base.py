"""Base class of the parsers of tool calls."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar

from larder.core.errors import BadParameter
from larder.core.registry import Family

TOOL_PARSERS = Family("tool call parser", "larder.server.tool_parsers")
# Beginning of a call up to its arguments, if the name comes first.
CALL_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def _number(text: str) -> int | float:
    """Number of JSON, as JavaScript writes it: 1.0 is 1."""
    value = float(text)
    if not isfinite(value):
        raise ValueError("a number that JSON cannot write")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _no_constant(name: str) -> None:
    """Refuse NaN and infinities, which JSON does not have, by ValueError."""
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_no_constant)


def _is_name(text: str) -> bool:
    """False for an empty text, and for half of a surrogate pair, which cannot be sent."""
    return text != "" and text.isprintable()


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool.

    Args:
        name: of the tool.
        arguments: JSON of its arguments, in the one spelling that clients' spellings are compared
            in.
        written: the arguments as the model wrote them; empty for the same as `arguments`.
    """

    name: str
    arguments: str
    written: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """Arguments as a client gets them, whether or not they are streamed."""
        return self.written or self.arguments

    @staticmethod
    def of(name: str, arguments: str) -> ToolCall:
        """Call whose arguments are JSON in any spelling, or any text."""
        try:
            return ToolCall(name, json.dumps(DECODER.decode(arguments or "{}")))
        except (ValueError, RecursionError):  # also numbers of thousands of digits
            return ToolCall(name, arguments)

    @staticmethod
    def from_json(value: Any) -> ToolCall | None:
        """Call from its decoded JSON; None for another value."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        if not _is_name(value["name"]):
            return None
        found = [value[key] for key in ("arguments", "parameters") if key in value]
        arguments = found[0] if found else {}
        return (
            ToolCall(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None
        )


@dataclass(frozen=True)
class CallPosition:
    """Start of a call in a text, or the index from which the search continues with more text.

    Args:
        start: index of the JSON of the call, or the index before which none begins.
        is_found: there is a call.
    """

    start: int
    is_found: bool


class ToolParser(ABC):
    """Parser of the tool calls at the end of an answer. It keeps nothing between calls."""

    # What the chat templates of such models contain.
    template_mark: ClassVar[str] = ""

    @abstractmethod
    def start(self, text: str) -> int:
        """Index from which on a text may be tool calls; its length for none. Text before it is
        final."""

    @abstractmethod
    def calls(self, text: str) -> tuple[ToolCall, ...]:
        """Complete calls of a text that begins at `start`; empty if it is no call."""

    def later_start(self, text: str) -> int:
        """Start of a call, as by `start`, in a text that follows content of the answer."""
        return len(text)

    def first_call(self, text: str, offset: int) -> CallPosition | None:
        """Place of the first call from an index on, in an answer from `start` on.

        None if no call can follow; always in a form whose calls are not streamed.
        """
        return None

    def later_call(self, text: str, offset: int) -> CallPosition | None:
        """Place of the next call from an index on, at which the call before it ends."""
        return self.first_call(text, offset)

    def grammar(self, schemas: Mapping[str, Any], most: int | None) -> str:
        """Grammar of an answer that is calls alone, in Lark's notation.

        Args:
            schemas: JSON schema of the arguments of each tool that may be called.
            most: largest number of calls; None for any.

        Raises:
            BadParameter: calls in this form cannot be forced.
        """
        raise BadParameter(
            "tool_choice can be auto or none alone with this tool call parser: its calls cannot be "
            "forced."
        )


def json_values(text: str) -> list[Any]:
    """JSON values at the beginning of a text, between white space, commas and semicolons."""
    found, offset = list[Any](), 0
    while True:
        while offset < len(text) and text[offset] in " \t\r\n,;":
            offset += 1
        try:
            value, offset = DECODER.raw_decode(text, offset)
        except (ValueError, RecursionError):
            return found
        found.append(value)


def call_head(text: str, offset: int) -> tuple[str, int] | None:
    """Name of a call whose JSON begins at an index, and where its arguments begin.

    None while they are not there, and where the name does not stand first or is none.
    """
    head = CALL_HEAD.match(text, offset)
    try:
        name = "" if head is None else json.loads(head[1])
    except ValueError:
        return None
    return (name, head.end()) if head is not None and _is_name(name) else None


def json_call(text: str, offset: int) -> tuple[ToolCall, int] | None:
    """Call whose JSON begins at an index, and where it ends; None if there is no whole one."""
    try:
        value, stop = DECODER.raw_decode(text, offset)
        head = call_head(text, offset)
        if head is None:
            call = ToolCall.from_json(value)
            return None if call is None else (call, stop)
        # Of a field that occurs twice the first counts: it may have been streamed already.
        name, start = head
        arguments, end = DECODER.raw_decode(text, start)
        return ToolCall(name, json.dumps(arguments), text[start:end]), stop
    except (ValueError, RecursionError):
        return None


def json_calls(parser: ToolParser, text: str) -> tuple[ToolCall, ...]:
    """Calls of a text in a form whose calls are streamed, up to the first that is none."""
    found, opening = list[ToolCall](), parser.first_call(text, 0)
    while opening is not None and opening.is_found:
        call = json_call(text, opening.start)
        if call is None:
            break
        found.append(call[0])
        opening = parser.later_call(text, call[1])
    return tuple(found)


def marker_start(text: str, marker: str, offset: int = 0) -> int:
    """Index of a marker in a text from an index on, or of its beginning at the end of the text."""
    found = text.find(marker, offset)
    if found >= 0:
        return found
    ends = (n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n]))
    return len(text) - next(ends, 0)


def call_schema(schemas: Mapping[str, Any], arguments: str) -> str:
    """JSON schema of a call of one of several tools.

    Args:
        arguments: name of the field with the arguments.
    """
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: schema},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
    # Without white space between values, which a model may repeat without end.
    return json.dumps({"x-guidance": {"whitespace_flexible": False}, "anyOf": options})


def valid_calls(values: Sequence[Any]) -> tuple[ToolCall, ...]:
    """Calls from decoded JSON; empty if one of the values is none."""
    found = [ToolCall.from_json(value) for value in values]
    return tuple(call for call in found if call is not None) if None not in found else ()
