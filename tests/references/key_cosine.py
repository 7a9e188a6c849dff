"""`key_cosine`: the highest cosine to any key of the prompt, both turned back to position 0."""

from __future__ import annotations

import math
from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of
from references.expected import dot, rotation, times

SMALL = {"kernel": 3}  # parameters for small layers


def scores(part: Any, observation: Observation) -> list[list[float]]:
    return [one_head(part, observation, head) for head in heads_of(observation)]


def one_head(part: Any, observation: Observation, head: int) -> list[float]:
    entries, start = observation.entries, observation.entries.starts[head]
    found: list[float] = []
    for row in range(start, start + entries.lengths[head]):
        position = int(entries.effective_rope_positions[row])
        key = times(rotation(observation, -position), entries.keys[row].tolist())
        best = -1.0
        for query in range(observation.keys.shape[1]):
            there = int(observation.effective_rope_positions[head, query])
            asked = times(rotation(observation, -there), observation.keys[head, query].tolist())
            lengths = math.sqrt(dot(key, key)) * math.sqrt(dot(asked, asked))
            best = max(best, dot(key, asked) / lengths)
        found.append(best)
    half = part.kernel // 2
    return [max(found[max(0, i - half) : i + half + 1]) for i in range(len(found))]
