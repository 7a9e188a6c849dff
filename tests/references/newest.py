"""`newest`: what an entry was given by the latest query that saw it."""

from __future__ import annotations

from references.tally_loop import Told


def remembered(told: Told) -> dict[str, float]:
    return {"newest": sum(told.weights[-1])}
