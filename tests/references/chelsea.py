"""`chelsea`: pairs of similar keys become means, chunk by chunk, until a head fits its budget."""

from __future__ import annotations

from typing import Any

from larder.core import Entries, LayerScores
from references.counted import Joined, count_of, mean, merge, protected_of
from references.ops.nearest import cosine
from references.outcome import Outcome, key_of, untouched

SMALL = {"chunk": 5}  # parameters for small layers


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    chosen: list[list[int]] = []
    clusters: list[Joined] = []
    for head, own in enumerate(kept):
        spared = [s for s in own if protected_of(entries, scored, head)[s]]
        room = len(own) - len(spared)
        free = [s for s in range(entries.lengths[head]) if s not in spared]
        joined = clustered(part, entries, head, free, room) if room else {}
        if len(own) == entries.lengths[head]:
            joined = {s: [] for s in free}
        chosen.append(sorted([*spared, *joined]))
        clusters.append({s: members for s, members in joined.items() if members})
    outcome = untouched(entries, chosen)
    for head, joined in enumerate(clusters):
        merge(outcome, entries, head, joined)
    return outcome


def clustered(part: Any, entries: Entries, head: int, free: list[int], room: int) -> Joined:
    """The entries that stay, and what is merged into each."""
    members: Joined = {s: [] for s in free}
    while len(members) > room:
        pairs = matches(part, entries, head, members)
        for _, s, into in sorted(pairs)[: len(members) - room]:
            members[into] += [s, *members.pop(s)]
    return members


def matches(
    part: Any, entries: Entries, head: int, members: Joined
) -> list[tuple[float, int, int]]:
    """Distance and indices of pairs: every other entry of a chunk with the nearest of the rest."""
    keys: dict[int, list[float]] = {}
    for s, others in members.items():
        every = [s, *others]
        counts = [count_of(entries, head, j) for j in every]
        keys[s] = mean([key_of(entries, head, j) for j in every], counts)
    order, found = sorted(members), []
    for first in range(0, len(order), part.chunk):
        chunk = order[first : first + part.chunk]
        for s in chunk[0::2]:
            if len(chunk) > 1:
                likeness, into = max((cosine(keys[s], keys[j]), -j) for j in chunk[1::2])
                found.append((-likeness, s, -into))
    return found
