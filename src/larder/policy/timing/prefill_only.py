"""Eviction in prefill only, at the end of a block and at the end of a turn.

No paper: the rule of every method that compresses a prompt. Generated tokens accumulate until they
have filled a block, which ends as a block of a context does; the end of a turn is the end of its
last.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.policy.timing.base import Timing


@dataclass(frozen=True)
class PrefillOnly(Timing):
    """No eviction at steps of generation: an answer that is shorter than a block stays whole."""

    def excess(self) -> int | None:
        return None


Part = PrefillOnly
