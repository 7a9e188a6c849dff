"""The mean of a table's rows, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def slow_table_rows(
    table: list[list[float]], encode: Callable[[str], Sequence[int]], texts: list[str]
) -> np.ndarray:
    rows = []
    for text in texts:
        chosen = [table[i] for i in encode(text)] or table
        mean = [sum(column) / len(chosen) for column in zip(*chosen, strict=True)]
        length = math.sqrt(sum(x * x for x in mean))
        rows.append([x / length for x in mean])
    return np.array(rows, dtype=np.float32)
