"""`cam`: a rejected value is spread over the kept entries that follow it."""

from __future__ import annotations

from typing import Any

from larder.core.observation import Entries, Scored
from references.counted import places_of
from references.outcome import Outcome, untouched, value_of


def settle(part: Any, entries: Entries, scored: Scored, kept: list[list[int]]) -> Outcome:
    del scored
    outcome = untouched(entries, kept)
    for head, own in enumerate(kept):
        held = {entry.kept: entry for entry in outcome.heads[head]}
        for s in range(entries.lengths[head]):
            following = [j for j in own if j > s][: part.window]
            if s in held or not following:
                continue
            around = sum(mass_of(entries, head, j) for j in following) / len(following)
            share = min(mass_of(entries, head, s) / around, 1.0)
            if part.merge.value == "sampled":
                share = float(luck(places_of(entries, head)[s], part.seed) < share)
            for j in following:
                value = value_of(entries, head, s)
                pairs = zip(held[j].value, value, strict=True)
                held[j].value = [a + share * b / len(following) for a, b in pairs]
    return outcome


def mass_of(entries: Entries, head: int, entry: int) -> float:
    return float(entries.columns["mass"][entries.starts[head] + entry])


def luck(position: int, seed: int) -> float:
    """MurmurHash3's last steps over 32 bits."""
    h = ((position + 1) * 2654435769 + seed * 2135587861) % 2**32
    h ^= h >> 16
    h = h * 2246822507 % 2**32
    h ^= h >> 13
    h = h * 3266489909 % 2**32
    h ^= h >> 16
    return h / 2**32
