"""Plans are made while a context is read; what is generated afterwards stays whole.

No paper: the rule of every method that compresses a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.policy.timing.base import Timing


@dataclass(frozen=True)
class PrefillOnly(Timing):
    """No eviction while decoding: an answer and its question are appended and cut off together."""

    def excess(self) -> int | None:
        return None


Part = PrefillOnly
