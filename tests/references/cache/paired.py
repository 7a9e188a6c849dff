"""Two layers that share entries, as dictionaries of lists: nothing saved, all said."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from references.ops.slerp import angle, slerp

Vector = list[float]


@dataclass
class PairedEntry:
    """One entry of one layer."""

    key: Vector
    value: Vector
    is_shared: bool = False
    wished: bool = False


@dataclass
class PairLoop:
    """Both layers: for each, by kv head, what is held at each position."""

    weight: float
    apart: float
    layers: tuple[list[dict[int, PairedEntry]], list[dict[int, PairedEntry]]] = field(
        default_factory=lambda: ([{}, {}], [{}, {}])
    )

    def fold(self, side: int, head: int, target: int, sources: list[tuple[int, float]]) -> None:
        """An entry becomes a sum of others, by position and weight, and its layer's own."""
        held = self.layers[side][head]
        size = range(len(held[target].key))
        key, value = (
            [sum(w * getattr(held[s], kind)[i] for s, w in sources) for i in size]
            for kind in ("key", "value")
        )
        held[target] = PairedEntry(key, value)

    def plan(self, side: int, kept: list[dict[int, int]]) -> None:
        """Keep positions with the grades that they shall have; the upper layer's plan shares."""
        for head, grades in enumerate(kept):
            held = self.layers[side][head]
            self.layers[side][head] = {index: held[index] for index in grades}
            for index, grade in grades.items():
                held[index].wished = grade == 1 and not held[index].is_shared
        if side == 1:
            self._share()
            for layer in self.layers:
                for held in layer:
                    for entry in held.values():
                        entry.wished = False

    def _share(self) -> None:
        found = [
            (lower[index], upper[index])
            for lower, upper in zip(*self.layers, strict=True)
            for index in lower
            if index in upper and lower[index].wished and upper[index].wished
        ]
        if not found:
            return
        far: set[int] = set()
        for kind in ("key", "value"):
            angles = [angle(getattr(a, kind), getattr(b, kind)) for a, b in found]
            least, most = min(angles), max(angles)
            limit = most - self.apart * (most - least)
            far |= {i for i, each in enumerate(angles) if each > limit and most - least >= 1e-6}
        for index, (lower, upper) in enumerate(found):
            if index in far:
                continue
            for kind in ("key", "value"):
                one, other = getattr(lower, kind), getattr(upper, kind)
                unit = slerp(one, other, self.weight)
                for entry, own in ((lower, one), (upper, other)):
                    length = math.sqrt(sum(x * x for x in own))
                    setattr(entry, kind, [length * x for x in unit])
            lower.is_shared = upper.is_shared = True
