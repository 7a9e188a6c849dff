"""`elastic`: every rejected entry joins the kept one nearest by position."""

from __future__ import annotations

from typing import Any

from larder.core import Entries, LayerScores
from references.attention_loop import positions_of
from references.counted import Joined, merge, protected_of
from references.outcome import Outcome, untouched


def settle(part: Any, entries: Entries, scored: LayerScores, kept: list[list[int]]) -> Outcome:
    outcome, variant = untouched(entries, kept), part.variant.value
    if variant != "larder" and scored.phase.value == "generating":
        return outcome
    for head, own in enumerate(kept):
        positions, spared = positions_of(entries, head), protected_of(entries, scored, head)
        anchors = [j for j in own if variant != "code" or not spared[j]]
        joined: Joined = {}
        for s in range(entries.lengths[head]):
            if s not in own and anchors:
                nearest = min(anchors, key=lambda j, s=s, at=positions: (abs(at[j] - at[s]), j))
                joined.setdefault(nearest, []).append(s)
        merge(outcome, entries, head, joined, counted=variant == "larder")
    return outcome
