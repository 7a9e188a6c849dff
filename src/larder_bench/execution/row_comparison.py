"""Comparison of a committed row with the same cell measured again.

Another kind of processor, or another kernel, rounds products of bfloat16 differently, and then a
token or a kept entry may change. `Rounding.SAME` demands equal values; `Rounding.OTHER` compares
what was measured on items by its mean over the cell, within tolerances, and everything else as
before.

The tolerances are about twice the largest difference of 50 cells of SmolLM2 in `ruler_inside`,
`dialogue` and `divergence`, measured on `AuthenticAMD avx512_bf16` and `GenuineIntel amx_bf16`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from statistics import fmean
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-9  # of numbers that are rounded in rows
SIZES = 0.01  # of bytes and of the tokens that fit them; differed by .006
# Of means over the items of a cell.
LOG_LIKELIHOOD = 0.2  # differed by .103
DIVERGENCE = 0.025  # .0124 nats
MASS = 0.001  # .0005
SCORE = 0.06  # .031 of many items, one of few
_TOLERANCES = {
    "log_likelihood": LOG_LIKELIHOOD,
    "kl": DIVERGENCE,
    "mass": MASS,
    "possible": MASS,
    "exact": SCORE,
    "own": SCORE,
    "f1": SCORE,
    "f1_stemmed": SCORE,
    "same": SCORE,
    "recall_1": SCORE,
    "recall_3": SCORE,
    "recall_5": SCORE,
}
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
            "with another or an unknown kind of processor or kernels, within "
            f"{LOG_LIKELIHOOD:g} of the mean log-likelihood, {DIVERGENCE:g} nats, one answer or "
            f"{SCORE:.0%} of them, and {SIZES:.0%} of bytes"
        )


def differences(committed: Any, measured: Any, rounding: Rounding, name: str = "") -> Iterator[str]:
    """Fields in which two values differ, nested ones by their path."""
    if isinstance(committed, dict) and isinstance(measured, dict):
        for key in sorted({*committed, *measured}):
            one, other = committed.get(key), measured.get(key)
            path = f"{name}.{key}" if name else key
            if rounding is Rounding.OTHER and key == ITEMS and one and other:
                yield from _item_differences(one, other, path)
            else:
                yield from differences(one, other, rounding, path)
    elif isinstance(committed, list) and isinstance(measured, list | tuple):
        if len(committed) != len(measured):
            yield f"{name}: {len(committed)} values committed, {len(measured)} measured"
            return
        for place, (one, other) in enumerate(zip(committed, measured, strict=True)):
            yield from differences(one, other, rounding, f"{name}[{place}]")
    elif not _is_equal(committed, measured, rounding, name):
        yield f"{name}: {committed!r} committed, {measured!r} measured"


def _item_differences(
    committed: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]], name: str
) -> Iterator[str]:
    """Differences of items whose measured fields count by their means over the cell."""
    left_out = {*_TOLERANCES, _ANSWER}
    fixed, again = ([_without(item, left_out) for item in items] for items in (committed, measured))
    yield from differences(fixed, again, Rounding.OTHER, name)
    for field, tolerance in _TOLERANCES.items():
        one, other = _mean(committed, field), _mean(measured, field)
        allowed = max(tolerance, 1 / len(committed)) if tolerance == SCORE else tolerance
        if one is None or other is None:
            yield from differences(one, other, Rounding.OTHER, f"mean {name}.{field}")
        elif abs(one - other) > allowed + ABSOLUTE:
            yield f"mean {name}.{field}: {one:.4g} committed, {other:.4g} measured"


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
