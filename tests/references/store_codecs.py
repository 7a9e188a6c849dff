"""Codecs of saved caches as slow loops over numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Rows = list[list[float]]


def affine(numbers: Rows, lengths: Sequence[int], bits: int, group: int, role: str) -> Rows:
    """Decoded numbers: every group on 2^bits levels from its least to its largest."""
    out = [row[:] for row in numbers]
    for cells in _groups(numbers, lengths, group, role):
        values = [numbers[r][c] for r, c in cells]
        low, scale = _down(min(values)), 0.0
        if min(values) == max(values):
            low = float(np.float16(values[0]))
        else:
            scale = _up((max(values) - low) / (2**bits - 1))
        for r, c in cells:
            code = round((numbers[r][c] - low) / scale) if scale else 0
            out[r][c] = low + scale * min(max(code, 0), 2**bits - 1)
    return out


def entropy(numbers: Rows, lengths: Sequence[int], step: float, group: int) -> Rows:
    """Decoded anchors and differences; `step` is in standard deviations."""
    out = [row[:] for row in numbers]
    start = 0
    for length in lengths:
        rows = range(start, start + length)
        anchors = [r for r in rows if (r - start) % group == 0]
        for c in range(len(numbers[0]) if numbers else 0):
            first = affine([[numbers[r][c]] for r in anchors], [len(anchors)], 8, 10**6, "keys")
            base = {r: first[i][0] for i, r in enumerate(anchors)}
            others = [r for r in rows if r not in base]
            own = {r: base[r - (r - start) % group] for r in others}
            left = [numbers[r][c] - own[r] for r in others]
            unit = math.sqrt(sum(x * x for x in left) / len(left)) if left else 1.0
            unit = float(np.float16(max(unit * step, 2.0**-14)))
            for r in anchors:
                out[r][c] = base[r]
            for r, x in zip(others, left, strict=True):
                out[r][c] = own[r] + round(x / unit) * unit
        start += length
    return out


def _groups(
    numbers: Rows, lengths: Sequence[int], group: int, role: str
) -> list[list[tuple[int, int]]]:
    width = len(numbers[0]) if numbers else 0
    if role == "values":
        spans = [range(c, min(c + group, width)) for c in range(0, width, group)]
        return [[(r, c) for c in span] for r in range(len(numbers)) for span in spans]
    found, start = [], 0
    for length in lengths:
        for first in range(start, start + length, group):
            rows = range(first, min(first + group, start + length))
            found += [[(r, c) for r in rows] for c in range(width)]
        start += length
    return found


def _down(value: float) -> float:
    near = np.float16(value)
    return float(near if float(near) <= value else np.nextafter(near, np.float16(-np.inf)))


def _up(value: float) -> float:
    return -_down(-value)


def predictive(
    layers: Sequence[tuple[Rows, Rows]], tables: Sequence[tuple[dict, dict]], step: float
) -> list[tuple[Rows, Rows]]:
    """Decoded keys before rotation and values, a token at a time.

    Args:
        layers: keys and values of each layer, kv heads side by side.
        tables: `weights`, `bias`, `forward` and `inverse` of both sides of each layer.
    """
    out: list[tuple[Rows, Rows]] = [([], []) for _ in layers]
    for token in range(len(layers[0][0])):
        below: list[float] = []
        for own, pair, found in zip(layers, tables, out, strict=True):
            decoded: list[list[float]] = []
            for side, table, rows in zip(own, pair, found, strict=True):
                inputs = [x for part in decoded for x in part] + below
                guess = _row(inputs, table["weights"], table["bias"])
                left = [x - y for x, y in zip(side[token], guess, strict=True)]
                components = _row(left, table["forward"], [0.0] * len(left))
                symbols = [round(x / step) for x in components]
                decoded.append(_row([x * step for x in symbols], table["inverse"], guess))
                rows.append(decoded[-1])
            below = decoded[0] + decoded[1]
    return out


def _row(row: Sequence[float], matrix: Rows, added: Sequence[float]) -> list[float]:
    """Row times matrix, plus another row."""
    found = list(added)
    for x, line in zip(row, matrix, strict=True):
        found = [total + x * y for total, y in zip(found, line, strict=True)]
    return found
