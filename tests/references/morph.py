"""`morph`: what the column of its fusion holds."""

from __future__ import annotations

from typing import Any

from larder.core.observation import Seen
from references.attention_loop import heads_of


def scores(part: Any, seen: Seen) -> list[list[float]]:
    entries = seen.entries
    column = entries.columns["fading_sum" if part.fusion.value == "sum" else "fading_max"]
    return [
        [float(column[entries.starts[head] + s]) for s in range(entries.lengths[head])]
        for head in heads_of(seen)
    ]
