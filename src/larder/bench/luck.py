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
    return _first(f"{name}-{tokens}-{seed}", range(seed * SEEDS, seed * SEEDS + TRIES), make)


def same_if_it_holds(
    name: str, seed: int, tokens: int, make: Callable[[int], Conversation]
) -> Conversation:
    """The conversation under the seed itself, else under the first of some that gives enough.

    Of a data set of ten files all of these give the same one.

    Raises:
        TooLittle: none does.
    """
    return _first(f"{name}-{tokens}-{seed}", range(seed, seed + TRIES * SEEDS, SEEDS), make)


def _first(name: str, seeds: range, make: Callable[[int], Conversation]) -> Conversation:
    for own in seeds[:-1]:
        try:
            return replace(make(own), name=name)
        except TooLittle:
            continue
    return make(seeds[-1])
