"""`subgen`: clusters of keys and draws of values, entry by entry."""

from __future__ import annotations

import math
from typing import Any

import torch

from larder.core import LOG_COUNT, Entries, LayerScores
from references.counted import count_of, protected_of
from references.outcome import Entry, Outcome, key_of, untouched, value_of

SMALL = {"delta": 0.8, "samples": 2, "share": 0.4}  # parameters for small layers

OUTSIDE = 14.0


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    if [len(own) for own in kept] == list(entries.lengths):
        return untouched(entries, kept)
    outcome = Outcome([])
    masses = []
    for head, own in enumerate(kept):
        before = number(float(entries.scalars["subgen_mass"][head]))
        if len(own) == entries.lengths[head]:
            outcome.heads += untouched_head(entries, head, own)
            masses.append(before)
            continue
        spared = [s for s in own if protected_of(entries, scored, head)[s]]
        samples, mass = sampled(part, entries, head, spared, len(own) - len(spared), before)
        rows = {entry.kept: entry for entry in untouched_head(entries, head, spared)[0]} | samples
        outcome.heads.append([rows[s] for s in sorted(rows)])
        masses.append(mass)
    outcome.scalars = {"subgen_mass": masses}
    return outcome


def untouched_head(entries: Entries, head: int, kept: list[int]) -> list[list[Entry]]:
    every = [kept if h == head else [] for h in range(len(entries.lengths))]
    return [untouched(entries, every).heads[head]]


def number(x: float) -> float:
    return 0.0 if math.isnan(x) else x


def sampled(
    part: Any, entries: Entries, head: int, spared: list[int], room: int, before: float
) -> tuple[dict[int, Entry], float]:
    """Samples of one head by their numbers, and the sum of |v|^2 so far."""
    free = [s for s in range(entries.lengths[head]) if s not in spared]
    held = {s: int(cell(entries, head, s, "subgen_cluster")) for s in free}
    drawn = {s: int(cell(entries, head, s, "subgen_draws")) for s in free}
    count = {s: count_of(entries, head, s) for s in free}
    values = max(int(part.share * room), 1) if room > 1 else 0
    each = before / max(sum(drawn.values()), 1)
    mass = {s: drawn[s] * each for s in free}
    for s in free:
        if not held[s] and not drawn[s]:
            mass[s] = count[s] * sum(x * x for x in value_of(entries, head, s))
    source = torch.Generator().manual_seed(
        (part.seed * 2_654_435_761 + int(entries.head_positions(head)[-1]) * 40_503) % 2**32
    )
    draws = spread([mass[s] for s in free], values, uniform(source))
    total, keys, labels = sum(mass.values()), dict.fromkeys(free, 0.0), dict.fromkeys(free, 0)
    judged = [s for s in free if held[s] or not drawn[s]]
    if judged and values:
        num_free = room - values
        groups = clusters(part, entries, head, judged, held, num_free)
        offsets = [uniform(source) for _ in groups]
        for label, (members, offset) in enumerate(zip(groups, offsets, strict=True), start=1):
            most = min(part.samples, num_free)
            for s, stands in key_samples(members, count, most, offset).items():
                keys[s], labels[s] = stands, label
    out: dict[int, Entry] = {}
    for s, times in zip(free, draws, strict=True):
        if times or keys[s]:
            weight = keys[s] or math.exp(-OUTSIDE)
            factor = times * total / values / mass[s] * count[s] / weight if times else 0.0
            columns = untouched_head(entries, head, [s])[0][0].columns | {
                LOG_COUNT: math.log(weight),
                "subgen_cluster": float(labels[s] if keys[s] else 0),
                "subgen_draws": float(times),
            }
            value = [factor * x for x in value_of(entries, head, s)]
            out[s] = Entry(s, key_of(entries, head, s), value, columns)
    return out, total


def cell(entries: Entries, head: int, entry: int, column: str) -> float:
    return float(entries.columns[column][entries.starts[head] + entry])


def uniform(source: torch.Generator) -> float:
    return float(torch.rand(1, generator=source, dtype=torch.float64))


def spread(weights: list[float], draws: int, offset: float) -> list[int]:
    """Evenly spaced marks, thrown at the weights in a row; how many fall on each."""
    total, done, before = sum(weights), 0.0, 0
    if not draws or total <= 0:
        return [0] * len(weights)
    out = []
    last = max(n for n, weight in enumerate(weights) if weight)
    for n, weight in enumerate(weights):
        done += weight
        marks = math.floor((draws if n >= last else done * draws / total) + offset)
        out.append(marks - before)
        before = marks
    return out


def clusters(
    part: Any, entries: Entries, head: int, judged: list[int], held: dict[int, int], room: int
) -> list[list[int]]:
    """Members of each cluster, the radius widened until the samples of all fit."""
    keys = {s: key_of(entries, head, s) for s in judged}
    middle = [sum(column) / len(keys) for column in zip(*keys.values(), strict=True)]
    square = sum(apart(key, middle) ** 2 for key in keys.values()) / len(keys)
    radius = part.delta * math.sqrt(square)
    former: dict[int, list[int]] = {}
    for s in judged:
        if held[s]:
            former.setdefault(held[s], []).append(s)
    leaders = {members[0]: members for members in former.values()}
    order = [*sorted(leaders), *(s for s in judged if not held[s])]
    while True:
        groups: list[list[int]] = []
        for s in order:
            near = [g for g in groups if apart(keys[g[0]], keys[s]) <= radius]
            (near[0] if near else groups.append(group := []) or group).append(s)
        groups = [[m for s in group for m in leaders.get(s, [s])] for group in groups]
        if sum(min(len(group), min(part.samples, room)) for group in groups) <= room:
            return [sorted(group) for group in groups]
        radius *= 1.25


def apart(one: list[float], other: list[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def key_samples(
    members: list[int], count: dict[int, float], samples: int, offset: float
) -> dict[int, float]:
    """Keys that each sample of a cluster stands for."""
    if len(members) <= samples:
        return {s: count[s] for s in members}
    times = spread([count[s] for s in members], samples, offset)
    stands = sum(count[s] for s in members) / samples
    return {s: n * stands for s, n in zip(members, times, strict=True) if n}
