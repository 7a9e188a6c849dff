"""`reconstruct`: the highest weight within the repeated chunk; other entries are not judged."""

from __future__ import annotations

import math
from typing import Any

from larder.core.observation import Seen
from references.attention_loop import heads_of, highest, positions_of


def scores(part: Any, seen: Seen) -> list[list[float]]:
    start, stop = seen.span
    out = []
    for head in heads_of(seen):
        visible = [start <= position < stop for position in positions_of(seen.entries, head)]
        row = highest(seen, head, visible)
        out.append([w if see else -math.inf for w, see in zip(row, visible, strict=True)])
    return out
