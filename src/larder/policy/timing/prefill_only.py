"""Plans are made while a context is read; what is generated afterwards stays whole.

No paper: the rule of every method that compresses a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillOnly:
    """No eviction while decoding: an answer and its question are appended and cut off together."""


Part = PrefillOnly
