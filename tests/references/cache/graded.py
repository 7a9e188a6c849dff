"""Heads of entries at several grades: which entry is in which group, by lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count


@dataclass
class GradedEntry:
    """An entry: its true position, its grade, and the group it was encoded in, 0 for none."""

    position: int
    grade: int = 0
    group: int = 0


class GradedLoop:
    def __init__(self, heads: int, groups: Sequence[int]) -> None:
        self.heads: list[list[GradedEntry]] = [[] for _ in range(heads)]
        self.groups = groups  # entries of a full group of grade 1, 2, ...
        self.names = count(1)

    def append(self, positions: Sequence[int]) -> None:
        for head in self.heads:
            head += [GradedEntry(position) for position in positions]

    def keep(
        self, chosen: Sequence[Sequence[tuple[int, int]]], targets: Sequence[set[int]] = ()
    ) -> None:
        """Keep entries, each by its index and the grade it shall have.

        Args:
            targets: of folds, for each head: they leave their groups as whole numbers.
        """
        for head, changed in zip(self.heads, targets, strict=False):
            for index in changed:
                head[index].grade = head[index].group = 0
        for h, wanted in enumerate(chosen):
            kept = [(self.heads[h][index], grade) for index, grade in wanted]
            for grade, size in enumerate(self.groups, 1):
                coming = [slot for slot, to in kept if to == grade and slot.grade < grade]
                there = [slot for slot, to in kept if to == grade and slot.grade == grade]
                self._settle(there, coming, size)
            for slot, grade in kept:
                slot.grade = grade
            self.heads[h] = [slot for slot, _ in kept]

    def truncate(self, length: int) -> None:
        self.keep(
            [
                [(i, slot.grade) for i, slot in enumerate(head) if slot.position < length]
                for head in self.heads
            ]
        )

    def _settle(self, there: list[GradedEntry], coming: list[GradedEntry], size: int) -> None:
        members: dict[int, list[GradedEntry]] = {}
        for slot in there:
            members.setdefault(slot.group, []).append(slot)
        small = [group for group in members.values() if 2 * len(group) < size]
        if not coming and len(small) < 2:
            return
        pool = [*coming, *(slot for group in small for slot in group)]
        pool.sort(key=lambda slot: slot.position)
        for start in range(0, len(pool), size):
            name = next(self.names)
            for slot in pool[start : start + size]:
                slot.group = name

    def sizes(self, grade: int) -> list[tuple[int, int]]:
        """Head and number of entries of every group, in any order."""
        found: dict[tuple[int, int], int] = {}
        for h, head in enumerate(self.heads):
            for slot in head:
                if slot.grade == grade:
                    found[h, slot.group] = found.get((h, slot.group), 0) + 1
        return sorted((h, number) for (h, _), number in found.items())
