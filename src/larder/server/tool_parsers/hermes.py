"""Calls as JSON between tags, as Hermes and Qwen write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from larder.server.tool_parsers.base import (
    ToolCall,
    ToolParser,
    call_schema,
    json_values,
    marker_start,
    valid_calls,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one after the other."""

    template_mark = OPEN
    end_tag = CLOSE

    def start(self, text: str) -> int:
        return marker_start(text, OPEN)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        found = list[ToolCall]()
        for part in _CALL.findall(text):
            calls = valid_calls(json_values(part)[:1])
            if not calls:  # those before it may have been sent already
                break
            found += calls
        return tuple(found)

    def grammar(self, schemas: Mapping[str, Any], most: int | None) -> str:
        count = "call" if most == 1 else 'call ("\\n" call)*'
        schema = call_schema(schemas, "arguments")
        return f'start: {count}\ncall: "{OPEN}\\n" body "\\n{CLOSE}"\nbody: %json {schema}'


Part = Hermes
