"""`lagged`: entries pile up, and go together when there are enough of them."""

from __future__ import annotations

from typing import Any

SMALL = {"tokens": 5}  # parameters for small layers


def reading(part: Any, tokens: int) -> int:
    return tokens


def held(part: Any, tokens: int, prompt: int, passes: list[int]) -> list[int]:
    """Entries per head after each pass of so many tokens."""
    out, now = [], min(tokens, prompt)
    for new in passes:
        now += new
        if now >= tokens + part.tokens:
            now = tokens
        out.append(now)
    return out
