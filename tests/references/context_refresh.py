"""`context_refresh`: 16 tokens behind the recent ones are judged at a time, and a share stays."""

from __future__ import annotations

import math
from typing import Any

# Parameters for small layers; every layer keeps the same.
SMALL = {"tokens": 3, "kept": 0.7, "share": 1.0, "recent": 2, "reading": 0.5}


def reading(part: Any, tokens: int) -> int:
    return max(1, int(part.reading * tokens))


def survivors(part: Any, depth: float) -> int:
    own = (1 - part.share) * (math.cos(math.pi * depth) + 1) / 2 + part.share
    return max(1, math.floor(part.tokens * part.kept * own + 1e-9))


def rounds_of(part: Any, tokens: int, appended: int) -> tuple[int, int]:
    """Rounds, and tokens that wait, counted one by one."""
    rounds = waiting = 0
    for _ in range(appended - min(part.recent, tokens - reading(part, tokens))):
        waiting += 1
        if waiting == part.tokens:
            rounds, waiting = rounds + 1, 0
    return rounds, waiting


def held(part: Any, tokens: int, prompt: int, passes: list[int]) -> list[int]:
    """Entries per head after each pass of so many tokens."""
    now, out, appended = min(prompt, reading(part, tokens)), [], 0
    first, free = reading(part, tokens), tokens - reading(part, tokens)
    for count in passes:
        appended += count
        rounds, waiting = rounds_of(part, tokens, appended)
        recent = min(appended, part.recent, free)
        most = first + min(recent + rounds * survivors(part, 0.0) + waiting, free)
        now = min(now + count, most)
        out.append(now)
    return out
