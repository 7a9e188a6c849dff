"""Calls as JSON between tags, as Hermes and Qwen write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from larder.server.tool_parsers.base import (
    CallPosition,
    ToolCall,
    ToolParser,
    call_schema,
    json_calls,
    marker_start,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other."""

    template_mark = OPEN

    def start(self, text: str) -> int:
        return marker_start(text, OPEN)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        return json_calls(self, text)

    def later_start(self, text: str) -> int:
        return marker_start(text, OPEN)

    def first_call(self, text: str, offset: int) -> CallPosition | None:
        start = marker_start(text, OPEN, offset)
        space = _SPACE.match(text, start + len(OPEN))
        if space is None or space.end() == len(text):  # the marker or what follows is to come
            return CallPosition(start, is_found=False)
        return CallPosition(space.end(), is_found=True)

    def grammar(self, schemas: Mapping[str, Any], most: int | None) -> str:
        count = "call" if most == 1 else 'call ("\\n" call)*'
        schema = call_schema(schemas, "arguments")
        return f'start: {count}\ncall: "{OPEN}\\n" body "\\n{CLOSE}"\nbody: %json {schema}'


Part = Hermes
