"""Comparison of a committed row with the same cell measured again.

Another kind of processor, or another kernel, rounds products of bfloat16 differently, and then a
token or a kept entry may change. `Rounding.SAME` demands equal values; `Rounding.OTHER` compares
what was measured on items by its mean over the cell, and everything else as before.

How far a mean may be from the committed one follows from how far rounding moves it. Of the cells
that `make smoke` takes, `studies/roundings.json` has the means under several kernels and the
committed mean of that time (as `benchmarks/roundings.py` writes them): another one may lie outside
of these by the whole range that they span, or by half of the fixed tolerance, which is the largest
difference of other cells, where they span less. A committed mean outside of these was changed since
and has the fixed tolerance, as cells that are not in the file have: about twice the largest
difference of 50 cells of SmolLM2 in `ruler_inside`, `dialogue` and `divergence`, measured on
`AuthenticAMD avx512_bf16` and `GenuineIntel amx_bf16`. A score may always differ by one answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Any

from larder_bench.results.rows import Row

Means = Mapping[str, Any]  # of fields of items: a mean, or those of several roundings

RELATIVE, ABSOLUTE = 1e-6, 1e-9  # of numbers that are rounded in rows
SIZES = 0.01  # of bytes and of the tokens that fit them; differed by .006
# Of means over the items of a cell.
LOG_LIKELIHOOD = 0.2  # differed by .103
DIVERGENCE = 0.025  # .0124 nats
MASS = 0.001  # .0005 of shares of attention, .00002 of cosines
SCORE = 0.06  # .031 of many items, one of few
_TOLERANCES = {
    "log_likelihood": LOG_LIKELIHOOD,
    "kl": DIVERGENCE,
    "mass": MASS,
    "possible": MASS,
    "similarity": MASS,
    "exact": SCORE,
    "own": SCORE,
    "f1": SCORE,
    "f1_stemmed": SCORE,
    "same": SCORE,
    "recall_1": SCORE,
    "recall_3": SCORE,
    "recall_5": SCORE,
}
LEAST = 1e-3  # share of a mean that it may always differ by: rounding of float32, and of rows
_SCORES = frozenset(name for name, allowed in _TOLERANCES.items() if allowed == SCORE)
_SIZES = ("_bytes", "bytes_share", "budget_tokens")
_ANSWER = "answer"  # text of an item; its scores are compared
ITEMS = "items"


class Rounding(Enum):
    """Comparison of roundings here and where a row was measured; `OTHER` if unknown."""

    SAME = "same"
    OTHER = "other"

    @property
    def comparison(self) -> str:
        """Description of the comparison."""
        if self is Rounding.SAME:
            return "exactly"
        return (
            "with another or an unknown kind of processor or kernels, means within what rounding "
            "moves them by or one answer, and bytes within "
            f"{SIZES:.0%}"
        )


@dataclass(frozen=True)
class Deviation:
    """Difference of two means over the items of a cell.

    Args:
        field: field of the items.
        allowed: largest difference that rounding explains.
    """

    field: str
    committed: float
    measured: float
    allowed: float

    @property
    def share(self) -> float:
        """Difference as a share of what is allowed."""
        return abs(self.committed - self.measured) / (self.allowed + ABSOLUTE)

    def __str__(self) -> str:
        return (
            f"{self.field} {self.committed:.4g} committed, {self.measured:.4g} measured, "
            f"{self.share:.0%} of what is allowed"
        )


def item_means(items: Sequence[Row]) -> dict[str, float]:
    """Means over the items of a cell, by field, of those that rounding moves."""
    means = {field: _mean(items, field) for field in _TOLERANCES}
    return {field: mean for field, mean in means.items() if mean is not None}


def largest_deviation(
    committed: Sequence[Row], measured: Sequence[Row], known: Means | None = None
) -> Deviation | None:
    """Difference of means that is the largest share of what is allowed; None if all are equal."""
    found = [each for each in _deviations(committed, measured, known) if each.share > 0]
    return max(found, key=lambda each: each.share, default=None)


def _deviations(
    committed: Sequence[Row], measured: Sequence[Row], known: Means | None
) -> Iterator[Deviation]:
    first, second = item_means(committed), item_means(measured)
    for field in first.keys() & second.keys():
        one, other = first[field], second[field]
        yield Deviation(field, one, other, _allowed(field, one, other, len(committed), known))


def _allowed(field: str, one: float, other: float, items: int, known: Means | None) -> float:
    """Largest difference of a mean from the committed one, `one`, on the side of the measured one.

    Args:
        items: number of items of the cell.
        known: see `differences`.
    """
    allowed, rounded = _TOLERANCES[field], LEAST * abs(one)
    values = None if known is None else known.get(field)
    if values and min(values) - rounded <= one <= max(values) + rounded:
        low, high = min(one, *values), max(one, *values)
        edge = high - one if other > one else one - low
        allowed = edge + max(high - low, allowed / 2)
    allowed = max(allowed, rounded)
    return max(allowed, 1 / items) if field in _SCORES else allowed


def differences(
    committed: Any,
    measured: Any,
    rounding: Rounding,
    name: str = "",
    known: Means | None = None,
) -> Iterator[str]:
    """Fields in which two values differ, nested ones by their path.

    Args:
        known: means of the items under several roundings, by field, the committed one among them
            as it was then; None for fixed tolerances.
    """
    if isinstance(committed, dict) and isinstance(measured, dict):
        for key in sorted({*committed, *measured}):
            one, other = committed.get(key), measured.get(key)
            path = f"{name}.{key}" if name else key
            if rounding is Rounding.OTHER and key == ITEMS and one and other:
                yield from _item_differences(one, other, path, known)
            else:
                yield from differences(one, other, rounding, path)
    elif isinstance(committed, list) and isinstance(measured, list | tuple):
        if len(committed) != len(measured):
            yield f"{name}: {len(committed)} values committed, {len(measured)} measured"
            return
        for index, (one, other) in enumerate(zip(committed, measured, strict=True)):
            yield from differences(one, other, rounding, f"{name}[{index}]")
    elif not _is_equal(committed, measured, rounding, name):
        yield f"{name}: {committed!r} committed, {measured!r} measured"


def _item_differences(
    committed: Sequence[Row], measured: Sequence[Row], name: str, known: Means | None
) -> Iterator[str]:
    """Differences of items whose measured fields count by their means over the cell."""
    left_out = {*_TOLERANCES, _ANSWER}
    fixed, again = ([_without(item, left_out) for item in items] for items in (committed, measured))
    yield from differences(fixed, again, Rounding.OTHER, name)
    first, second = item_means(committed), item_means(measured)
    for field in sorted(first.keys() ^ second.keys()):
        one, other = first.get(field), second.get(field)
        yield from differences(one, other, Rounding.OTHER, f"mean {name}.{field}")
    for each in sorted(_deviations(committed, measured, known), key=lambda one: one.field):
        if each.share > 1:
            yield (
                f"mean {name}.{each.field}: {each.committed:.4g} committed, {each.measured:.4g} "
                f"measured; {each.allowed:.2g} is allowed"
            )


def _without(item: Mapping[str, Any], fields: set[str]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in fields}


def _mean(items: Sequence[Mapping[str, Any]], field: str) -> float | None:
    values = [item[field] for item in items if item.get(field) is not None]
    return fmean(values) if values else None


def _is_equal(one: Any, other: Any, rounding: Rounding, name: str) -> bool:
    if rounding is Rounding.OTHER and name.endswith(_SIZES):
        return math.isclose(one or 0, other or 0, rel_tol=SIZES)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return one == other
