"""`split`: what was read stays; what comes after has its own room, which may grow."""

from __future__ import annotations

from typing import Any

SMALL = {"reading": 0.6, "recent": 2, "every": 4}  # parameters for small layers


def reading(part: Any, tokens: int) -> int:
    whole = 0
    while whole + 1 <= part.reading * tokens:
        whole += 1
    return max(whole, 1)


def room(part: Any, tokens: int, step: int) -> int:
    """Entries per head for what is generated, once `step` tokens are."""
    free = tokens - reading(part, tokens)
    now = part.recent if isinstance(part.recent, int) else max(1, int(part.recent * free))
    if part.strategy.value == "slide":
        return free
    for generated in range(1, step + 1):
        if generated % part.every == 0:
            now += 1
    return min(now, free)


def held(part: Any, tokens: int, prompt: int, passes: list[int]) -> list[int]:
    """Entries per head after each pass of so many tokens."""
    read, waits = reading(part, tokens), part.strategy.value == "discontinuous"
    out, now = [], min(read, prompt)
    for step, new in enumerate(passes):
        now += new
        most = read + room(part, tokens, step)
        if now > most and (not waits or now - most >= part.every):
            now = most
        out.append(now)
    return out
