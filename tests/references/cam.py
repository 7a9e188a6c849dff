"""`cam`: a rejected value is spread over the kept entries that follow it."""

from __future__ import annotations

from typing import Any

from larder.core import Entries, LayerScores
from references.attention_loop import positions_of
from references.outcome import Outcome, untouched, value_of

SMALL = {"window": 2, "seed": 7}  # parameters for small layers


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    outcome = untouched(entries, kept)
    if scored.phase.value != "generating" or not goes_and_stays(entries, kept):
        return outcome
    for head, entries_kept in enumerate(outcome.heads):
        for entry in entries_kept:
            entry.columns["joined"] = column_of(entries, "joined", head, entry.kept)
    for head, own in enumerate(kept):
        held = {entry.kept: entry for entry in outcome.heads[head]}
        for s in range(entries.lengths[head]):
            behind = [j for j in own if j > s]
            following = behind[: part.window]
            if s in held or not following:
                continue
            around = sum(weight_of(entries, head, j) for j in behind) / len(behind)
            share = min(weight_of(entries, head, s) / around, 1.0)
            if part.merge.value == "sampled":
                share = float(chance(positions_of(entries, head)[s], head, part.seed) < share)
            for j in following:
                single = 1 + column_of(entries, "joined", head, s)
                value = [number / single for number in value_of(entries, head, s)]
                pairs = zip(held[j].value, value, strict=True)
                held[j].value = [a + share * b / len(following) for a, b in pairs]
                held[j].columns["joined"] += share / len(following)
    return outcome


def goes_and_stays(entries: Entries, kept: list[list[int]]) -> bool:
    return 0 < sum(map(len, kept)) < sum(entries.lengths)


def weight_of(entries: Entries, head: int, entry: int) -> float:
    return column_of(entries, "newest", head, entry)


def column_of(entries: Entries, name: str, head: int, entry: int) -> float:
    return float(entries.columns[name][entries.starts[head] + entry])


def chance(position: int, head: int, seed: int) -> float:
    """MurmurHash3's last steps over 32 bits."""
    h = ((position + 1) * 2654435769 + head * 2496678331 + seed * 2135587861) % 2**32
    h ^= h >> 16
    h = h * 2246822507 % 2**32
    h ^= h >> 13
    h = h * 3266489909 % 2**32
    h ^= h >> 16
    return h / 2**32
