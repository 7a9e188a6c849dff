"""`patched`: the highest softmax weight of any prompt query over cached entries."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of, highest, highest_in_plain_attention


def scores(part: Any, seen: Observation) -> list[list[float]]:
    shown = [[True] * seen.entries.lengths[head] for head in heads_of(seen)]
    look = highest_in_plain_attention if part.variant.value == "paper" else highest
    return [look(seen, head, shown[head]) for head in heads_of(seen)]
