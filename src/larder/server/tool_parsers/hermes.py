"""Calls as JSON between tags, as Hermes and Qwen write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from larder.server.tool_parsers.base import (
    ToolCall,
    ToolParser,
    call_schema,
    json_calls,
    marker_start,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN = re.compile(rf"{OPEN}\s*")


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other."""

    template_mark = OPEN

    def start(self, text: str) -> int:
        return marker_start(text, OPEN)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        return json_calls(self, text)

    def next_call(self, text: str, place: int) -> int | None:
        found = _OPEN.search(text, place)
        return None if found is None else found.end()

    def grammar(self, schemas: Mapping[str, Any], most: int | None) -> str:
        count = "call" if most == 1 else 'call ("\\n" call)*'
        schema = call_schema(schemas, "arguments")
        return f'start: {count}\ncall: "{OPEN}\\n" body "\\n{CLOSE}"\nbody: %json {schema}'


Part = Hermes
