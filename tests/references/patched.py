"""`patched`: the highest softmax weight of any prompt query over cached entries."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of, highest, highest_in_plain_attention


def scores(part: Any, observation: Observation) -> list[list[float]]:
    shown = [[True] * observation.entries.lengths[head] for head in heads_of(observation)]
    look = highest_in_plain_attention if part.variant.value == "paper" else highest
    return [look(observation, head, shown[head]) for head in heads_of(observation)]
