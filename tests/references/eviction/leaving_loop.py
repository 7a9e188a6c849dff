"""Order of evictions by any rule, one at a time: names in a list, with their scores."""

from __future__ import annotations

from larder.store import Candidate, EvictionPolicy, SupersededOrder


def victims(
    part: EvictionPolicy,
    candidates: list[Candidate],
    worths: list[float],
    now: float,
    wanted_bytes: int,
) -> list[str]:
    line = queue(part, candidates, worths, now)
    gone: list[Candidate] = []
    while line and sum(one.bytes for one in gone) < wanted_bytes:
        needed = {one.parent for one in line}
        goes = next(one for one in line if one.name not in needed)
        line.remove(goes)
        gone.append(goes)
    return [one.name for one in gone]


def queue(
    part: EvictionPolicy, candidates: list[Candidate], worths: list[float], now: float
) -> list[Candidate]:
    """All of them, who should go first first, whatever continues them."""
    worth = {one.name: own for one, own in zip(candidates, worths, strict=True)}
    fate = part.superseded
    for one in candidates:
        if one.superseded and fate is SupersededOrder.INSIDE:
            newest = [
                worth[o.name] for o in candidates if o.session == one.session and not o.superseded
            ]
            worth[one.name] = min([worth[one.name], *newest])

    def place(one: Candidate) -> tuple[float, ...]:
        if fate is SupersededOrder.FIRST:
            return (not one.superseded, worth[one.name], one.last_used)
        if fate is SupersededOrder.INSIDE and any(o.superseded for o in candidates):
            return (worth[one.name], not one.superseded, one.last_used)
        return (worth[one.name], one.last_used)

    line = sorted(candidates, key=place)
    places = {}
    for number, one in enumerate(line):
        late = now - one.pinned_until
        pin = 1.0 if late <= 0 else 0.5 ** (late / part.half_life)
        places[one.name] = number / len(line) + pin
    return sorted(line, key=lambda one: places[one.name])
