"""Calls as bare JSON, as Llama 3.1 and 3.2 write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from larder.server.tool_parsers.base import (
    CallPosition,
    ToolCall,
    ToolParser,
    call_schema,
    json_calls,
)

TAG = "<|python_tag|>"  # special, so that detokenizers leave it out
SEPARATORS = " \t\r\n,;"


class Llama3Json(ToolParser):
    """`{"name": ..., "parameters": {...}}`, several between semicolons; the whole answer."""

    template_mark = TAG

    def start(self, text: str) -> int:
        stripped = text.lstrip().removeprefix(TAG).lstrip()
        return 0 if stripped.startswith("{") or TAG.startswith(stripped) else len(text)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        return json_calls(self, text)

    def first_call(self, text: str, offset: int) -> CallPosition | None:
        rest = text[offset:].lstrip().removeprefix(TAG).lstrip()
        if rest.startswith("{"):
            return CallPosition(len(text) - len(rest), is_found=True)
        return CallPosition(offset, is_found=False) if TAG.startswith(rest) else None

    def later_call(self, text: str, offset: int) -> CallPosition | None:
        rest = text[offset:].lstrip(SEPARATORS)
        is_open = not rest or rest.startswith("{")
        return CallPosition(len(text) - len(rest), is_found=bool(rest)) if is_open else None

    def grammar(self, schemas: Mapping[str, Any], most: int | None) -> str:
        count = "call" if most == 1 else 'call ("; " call)*'
        return f"start: {count}\ncall: %json {call_schema(schemas, 'parameters')}"


Part = Llama3Json
