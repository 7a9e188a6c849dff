"""`mass`: everything that an entry was given."""

from __future__ import annotations

from references.tally_loop import Told


def remembered(told: Told) -> dict[str, float]:
    return {"mass": sum(weight for row in told.weights for weight in row)}
