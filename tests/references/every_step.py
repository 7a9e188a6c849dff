"""`every_step`: never more than the budget."""

from __future__ import annotations

from typing import Any


def reading(part: Any, tokens: int) -> int:
    return tokens


def held(part: Any, tokens: int, prompt: int, passes: list[int]) -> list[int]:
    """Entries per head after each pass of so many tokens."""
    return [min(tokens, prompt + sum(passes[: n + 1])) for n in range(len(passes))]
