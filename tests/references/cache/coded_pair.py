"""Two layers whose shared directions and other entries are rounded, one vector at a time."""

from __future__ import annotations

import math

from references.ops.quantization import rounded
from references.ops.slerp import angle, slerp

Vector = list[float]
Layer = list[list[tuple[Vector, Vector]]]  # by kv head and entry: key and value


def exceptions(layers: tuple[Layer, Layer], apart: float) -> set[tuple[int, int]]:
    """Heads and entries that stay unshared: those of the widest angles, no more than a share."""
    names = [(head, i) for head, own in enumerate(layers[0]) for i in range(len(own))]
    angles = {
        name: [
            angle(layers[0][name[0]][name[1]][k], layers[1][name[0]][name[1]][k]) for k in (0, 1)
        ]
        for name in names
    }
    far: set[tuple[int, int]] = set()
    for kind in (0, 1):
        least, most = (bound(each[kind] for each in angles.values()) for bound in (min, max))
        far |= {n for n, each in angles.items() if each[kind] > most - apart * (most - least)}
    return set(sorted(far, key=lambda name: -sum(angles[name]))[: int(apart * len(names))])


def decoded_pair(
    layers: tuple[Layer, Layer], weight: float, apart: float, bits: int, group: int
) -> tuple[Layer, Layer]:
    """Entries that both layers read once all of their entries were requested to be shared."""
    far = exceptions(layers, apart)
    found: tuple[Layer, Layer] = ([], [])
    for head, (lower, upper) in enumerate(zip(*layers, strict=True)):
        entries: tuple[dict[int, list[Vector]], dict[int, list[Vector]]] = ({}, {})
        for own in (True, False):
            rows = [i for i in range(len(lower)) if ((head, i) in far) is own]
            for start in range(0, len(rows), group):
                part = rows[start : start + group]
                for kind in (0, 1):
                    ones, others = ([side[i][kind] for i in part] for side in (lower, upper))
                    for side, vectors in enumerate(
                        _read(ones, others, weight, bits, group, kind, own)
                    ):
                        for i, vector in zip(part, vectors, strict=True):
                            entries[side].setdefault(i, []).append(vector)
        for side in (0, 1):
            found[side].append([(k, v) for _, (k, v) in sorted(entries[side].items())])
    return found


def _read(
    ones: list[Vector],
    others: list[Vector],
    weight: float,
    bits: int,
    group: int,
    kind: int,
    is_own: bool,
) -> tuple[list[Vector], list[Vector]]:
    by_channel = kind == 0
    if is_own:
        return rounded(ones, bits, group, by_channel), rounded(others, bits, group, by_channel)
    directions = [slerp(one, other, weight) for one, other in zip(ones, others, strict=True)]
    coded = rounded(directions, bits, group, by_channel)
    return _scaled(coded, ones), _scaled(coded, others)


def _scaled(directions: list[Vector], lengths_of: list[Vector]) -> list[Vector]:
    """Vectors of these directions, as long as others."""
    return [
        [x * _length(own) / _length(unit) for x in unit]
        for unit, own in zip(directions, lengths_of, strict=True)
    ]


def _length(vector: Vector) -> float:
    return math.sqrt(sum(x * x for x in vector))
