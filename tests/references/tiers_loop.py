"""Entries that go down a grade, one group after the other."""

from __future__ import annotations

from larder.core import Codec, Entries, Plan


def rooms(
    quota: int, waiting: int, tiers: list[tuple[Codec, float]], head_dim: int, itemsize: int
) -> list[int]:
    """Entries per head at each grade but the last, under the bytes that `quota` was made of."""
    full = 2 * head_dim * itemsize + 4
    left = 1.0
    gain = 0.0
    for codec, share in tiers:
        left -= share
        gain += share * full / codec.bytes_per_entry(head_dim, itemsize)
    gain += left
    beyond = max(quota - waiting, 0) / gain
    found = [min(quota, waiting) + int(left * beyond)]
    for codec, share in tiers[:-1]:
        found.append(int(share * beyond * full / codec.bytes_per_entry(head_dim, itemsize)))
    return found


def lowered(
    plan: Plan, entries: Entries, ranked: list[float], rooms: list[int], groups: list[int]
) -> list[int]:
    """One grade per kept entry; `ranked` and the held grades are per packed entry."""
    held = standing(plan, entries)
    kept = plan.kept.tolist()
    result: list[int] = []
    start = 0
    for length in plan.lengths:
        own = kept[start : start + length]
        grades = [held[entry] for entry in own]
        for grade, (room, group) in enumerate(zip(rooms, groups, strict=True)):
            room = room * len(plan.lengths) * length // max(len(kept), 1)
            here = [index for index in range(length) if grades[index] == grade]
            here.sort(key=lambda index: (ranked[own[index]], index))
            while len(here) > room:
                for index in here[:group]:
                    grades[index] = grade + 1
                here = here[group:]
        result += grades
        start += length
    return result


def standing(plan: Plan, entries: Entries) -> list[int]:
    """The grade of every packed entry; that of one others are merged into is forgotten."""
    held: list[int] = []
    for head, length in enumerate(entries.lengths):
        for row in range(entries.starts[head], entries.starts[head] + length):
            held.append(int(entries.grades[row]) if len(entries.grades) else 0)
    for target in plan.folds.targets.tolist():
        held[target] = 0
    return held


def positions(entries: Entries) -> list[float]:
    """The position of every packed entry."""
    found: list[float] = []
    for head, length in enumerate(entries.lengths):
        first = entries.starts[head]
        found += [float(index) for index in entries.positions[first : first + length].tolist()]
    return found
