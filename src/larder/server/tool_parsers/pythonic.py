"""Calls as a list of Python calls, as Llama 4 and small Llama 3.2 models write them."""

from __future__ import annotations

import ast
import json
from typing import Any

from larder.server.tool_parsers.base import ToolCall, ToolParser


class Pythonic(ToolParser):
    """`[f(a=1), g(b="x")]` with literal arguments; the whole answer."""

    def start(self, text: str) -> int:
        stripped = text.lstrip()
        return 0 if not stripped or stripped.startswith("[") else len(text)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            return tuple(map(_call, tree.elts)) if isinstance(tree, ast.List) else ()
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return ()


def _call(node: Any) -> ToolCall:
    """Call of a node. Raises: ValueError, TypeError: it is another expression."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call by keywords")
    name = ast.unparse(node.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("not a name")
    given = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords if each.arg}
    return ToolCall.of(name, json.dumps(given, allow_nan=False))


Part = Pythonic
