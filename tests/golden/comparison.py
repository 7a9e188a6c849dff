"""Goldens on disk, and comparison of current values with them.

Numbers with a fraction agree to a tolerance, because processors round differently; all else is
equal. What no two runs have in common (times, paths, versions) and sentences for people, which may
be reworded, are replaced by a mask before they are written or compared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parent / "fixtures"
TOLERANCE = 1e-3
SHOWN = 12  # differences that a failure lists
MASK = "*"
LEAVES = re.compile(r"\[\n\s+([^\[\]{}]*?)\n\s+\]")  # lists of numbers and words, one item a line
TIMES = ("seconds", "per_second")  # how the names of fields end that hold measured times

Golden = Callable[[], Any]


INDENT = re.compile(r"\n\s+")


def differences(expected: Any, found: Any, tolerance: float = TOLERANCE) -> list[str]:
    """Lines, one for every place where a value differs from its golden."""
    return list(_differences(expected, found, tolerance, "$"))


def check(name: str, found: Any, tolerance: float = TOLERANCE, may_grow: bool = False) -> None:
    """Compare a value with the golden of that name.

    Args:
        may_grow: whether parts that the golden does not name may have joined.

    Raises:
        AssertionError: the value differs.
    """
    path = FIXTURES / f"{name}.json"
    expected, now = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(found))
    if may_grow:
        now = known_parts(expected, now)
    lines = differences(expected, now, tolerance)
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    assert not lines, "\n".join([f"{path.name} differs:", *lines[:SHOWN], *more])


def known_parts(expected: Any, found: Any) -> Any:
    """A listing without the parts that its golden does not name."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return {key: known_parts(expected[key], found[key]) for key in found if key in expected}
    if not (isinstance(expected, list) and isinstance(found, list)):
        return found
    names = [_name(each) for each in expected]
    return [each for each in found if _name(each) in names]


def _name(part: Any) -> Any:
    return part.get("name") if isinstance(part, dict) else part


def write(name: str, value: Any) -> Path:
    """Replace a golden."""
    path = FIXTURES / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    text = LEAVES.sub(lambda found: f"[{INDENT.sub(' ', found[1])}]", text)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def masked(value: Any, names: Collection[str] = ()) -> Any:
    """A document with the values of some fields, and all times, masked wherever they stand.

    Lists keep their length.
    """
    if isinstance(value, Mapping):
        return {
            name: _masked_whole(inner)
            if name in names or name.endswith(TIMES)
            else masked(inner, names)
            for name, inner in value.items()
        }
    return [masked(each, names) for each in value] if isinstance(value, list | tuple) else value


def _masked_whole(value: Any) -> Any:
    return [_masked_whole(each) for each in value] if isinstance(value, list) else MASK


def _differences(expected: Any, found: Any, tolerance: float, place: str) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        yield from (f"{place}.{name}: missing" for name in expected if name not in found)
        yield from (f"{place}.{name}: new" for name in found if name not in expected)
        for name in expected:
            if name in found:
                yield from _differences(expected[name], found[name], tolerance, f"{place}.{name}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{place}: {len(found)} items, not {len(expected)}"
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from _differences(one, other, tolerance, f"{place}[{index}]")
    elif not _agree(expected, found, tolerance):
        yield f"{place}: {found!r}, not {expected!r}"


def _agree(expected: Any, found: Any, tolerance: float) -> bool:
    if float in (type(expected), type(found)) and {type(expected), type(found)} <= {int, float}:
        return math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)
    return type(expected) is type(found) and expected == found
