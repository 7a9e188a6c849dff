"""`chelsea`: what is rejected joins the most similar kept entry of its chunk."""

from __future__ import annotations

import math
from typing import Any

from larder.core.observation import Entries, Scored
from references.counted import Joined, merge
from references.ops.nearest import cosine
from references.outcome import Outcome, key_of, untouched


def settle(part: Any, entries: Entries, scored: Scored, kept: list[list[int]]) -> Outcome:
    del scored
    outcome = untouched(entries, kept)
    for head, own in enumerate(kept):
        matches: list[tuple[float, int, int]] = []
        for s in range(entries.lengths[head]):
            if s in own:
                continue
            key, near = key_of(entries, head, s), candidates(part, s, own)
            likeness = {j: cosine(key, key_of(entries, head, j)) for j in near}
            if near:
                best = max(near, key=lambda j, u=likeness: (u[j], -j))
                matches.append((-likeness[best], s, best))
        joined: Joined = {}
        count = math.ceil(round(part.merged * len(matches), 6))
        for _, s, best in sorted(matches)[:count]:
            joined.setdefault(best, []).append(s)
        merge(outcome, entries, head, joined)
    return outcome


def candidates(part: Any, s: int, kept: list[int]) -> list[int]:
    """The kept entries of a chunk, or those of its other half."""
    chunk = [j for j in kept if j // part.chunk == s // part.chunk]
    if part.halves.value == "every":
        return chunk
    first = s // part.chunk * part.chunk
    return [j for j in chunk if (j - first) % 2 != (s - first) % 2]
