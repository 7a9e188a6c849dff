"""Try again where chance drew too little to ask about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from larder.core.conversation import Conversation
from larder.core.errors import TooLittle

SEEDS = 1000  # kept for one conversation, so that no two share one
TRIES = 100  # of these


def first_that_holds(
    name: str, seed: int, tokens: int, make: Callable[[int], Conversation]
) -> Conversation:
    """The conversation under the first of its own seeds that gives enough to ask.

    Raises:
        TooLittle: none does.
    """
    first = seed * SEEDS
    for own in range(first, first + TRIES - 1):
        try:
            return replace(make(own), name=f"{name}-{tokens}-{seed}")
        except TooLittle:
            continue
    return make(first + TRIES - 1)
