"""Cases of several parameters: part of their product in the default suite, all in the extended."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def covering(*axes: Collection[Any]) -> list[Any]:
    """Cases of a product of parameters, for `pytest.mark.parametrize`.

    Those of the default suite have every value of every parameter: the case with number n has the
    n-th value of each, counted from the start again behind the last. All others are extended.
    """
    values = [list(axis) for axis in axes]
    lengths = [len(axis) for axis in values]
    chosen = {tuple(n % length for length in lengths) for n in range(max(lengths))}
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(values, case, strict=True)),
            marks=[] if case in chosen else [pytest.mark.extended],
        )
        for case in product(*map(range, lengths))
    ]


def one_in(count: int, values: Collection[Any]) -> list[Any]:
    """Values of one parameter, one in `count` of them in the default suite, all others extended."""
    return [
        pytest.param(value, marks=[pytest.mark.extended] if number % count else [])
        for number, value in enumerate(values)
    ]
