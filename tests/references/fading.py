"""`fading`: what was given lately, a 32nd less for every token since."""

from __future__ import annotations

from references.tally_loop import Told


def remembered(told: Told) -> dict[str, float]:
    now = told.times[-1]
    given = zip(told.times, told.weights, strict=True)
    left = [sum(row) * (31 / 32) ** (now - time) for time, row in given]
    return {"fading_sum": sum(left), "fading_max": max(left)}
