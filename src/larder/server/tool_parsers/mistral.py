"""Calls behind a marker, as Mistral's models write them."""

from __future__ import annotations

import re

from larder.server.tool_parsers.base import (
    ToolCall,
    ToolParser,
    json_values,
    marker_start,
    valid_calls,
)

MARKER, ARGS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[ARGS\])?\s*(?=\{)")


class Mistral(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` of newer
    tokenizers.

    The marker is a special token, which detokenizers leave out: a list of calls at the beginning of
    an answer is found without it.
    """

    template_mark = MARKER

    def start(self, text: str) -> int:
        stripped = text.lstrip()
        if not stripped or "[{".startswith(stripped[:2]):
            return 0
        return marker_start(text, MARKER)

    def later_start(self, text: str) -> int:
        return marker_start(text, MARKER)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        found = list[ToolCall]()
        for part in filter(str.strip, text.split(MARKER)):
            name = _NAME.match(part)
            values = json_values(part[name.end() :] if name else part)[:1]
            if name and values and isinstance(values[0], dict):
                values = [{"name": name[1], "arguments": values[0]}]
            elif values and isinstance(values[0], list):
                values = values[0]
            calls = valid_calls(values)
            if not calls:
                return ()
            found += calls
        return tuple(found)


Part = Mistral
