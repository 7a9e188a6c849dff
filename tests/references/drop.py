"""`drop`: nothing is done for the rejected."""

from __future__ import annotations

from typing import Any

from larder.core import Entries, LayerScores
from references.outcome import Outcome, untouched


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    return untouched(entries, kept)
