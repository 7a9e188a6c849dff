"""`column_mass`: what the column `mass` holds."""

from __future__ import annotations

from typing import Any

from larder.core import Observation
from references.attention_loop import heads_of


def scores(part: Any, observation: Observation) -> list[list[float]]:
    entries, column = observation.entries, observation.entries.columns["mass"]
    return [
        [float(column[entries.starts[head] + s]) for s in range(entries.lengths[head])]
        for head in heads_of(observation)
    ]
