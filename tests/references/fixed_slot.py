"""`fixed_slot`: append, then delete at the same index, again and again."""

from __future__ import annotations

from typing import Any

SMALL = {"distance": 4}  # parameters for small layers


def reading(part: Any, tokens: int) -> int:
    return tokens


def held(part: Any, tokens: int, prompt: int, passes: list[int]) -> list[int]:
    """Entries per head after each pass of so many tokens."""
    return [min(tokens, prompt + sum(passes[: n + 1])) for n in range(len(passes))]


def places(part: Any, tokens: int, held: list[int], passes: list[int], start: int) -> list[int]:
    """Positions that a head holds in the end, of those it held and those that came."""
    own = list(held)
    for count in passes:
        for _ in range(count):
            own.append(start)
            start += 1
            if len(own) > tokens:
                del own[max(tokens - part.distance, 0)]
    return own
