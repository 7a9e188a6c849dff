"""A value that differs from its golden is reported, with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from golden import comparison
from golden.comparison import FIXTURES, check, differences, masked
from golden.every import GOLDENS, SLOW


def changed(value: Any) -> Any:
    """Copy that differs only in its last value."""
    if isinstance(value, dict) and value:
        return value | {(last := list(value)[-1]): changed(value[last])}
    if isinstance(value, list) and value:
        return [*value[:-1], changed(value[-1])]
    return 12345


def test_every_kind_of_difference_is_found() -> None:
    golden = {"a": 1, "b": [1.0, "x"], "c": None, "d": True}
    assert differences(golden, {"d": True, "c": None, "b": [1.0004, "x"], "a": 1}) == []
    for other, place in (
        ({"a": 2}, "$.a: 2, not 1"),
        ({"a": True}, "$.a: True, not 1"),
        ({"b": [1.01, "x"]}, "$.b[0]: 1.01, not 1.0"),
        ({"b": [1.0, "y"]}, "$.b[1]: 'y', not 'x'"),
        ({"b": [1.0]}, "$.b: 1 items, not 2"),
        ({"c": 0}, "$.c: 0, not None"),
        ({"e": 1}, "$.e: new"),
    ):
        assert differences(golden, golden | other) == [place]
    assert differences(golden, {n: golden[n] for n in "abc"}) == ["$.d: missing"]


def test_changed_value_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "FIXTURES", tmp_path)
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    check("x", {"a": 1})
    with pytest.raises(AssertionError, match=r"x\.json differs:\n\$\.a: 2, not 1"):
        check("x", {"a": 2})


def test_listing_may_grow_but_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "FIXTURES", tmp_path)
    listing = {"parts": [{"name": "a", "fields": [{"name": "x"}]}], "scorer": ["a", "b"]}
    (tmp_path / "x.json").write_text(json.dumps(listing))
    more = {"parts": [{"name": "n"}, *listing["parts"]], "scorer": ["a", "b", "n"], "new": ["n"]}
    check("x", more, may_grow=True)
    wider = {**more, "parts": [{"name": "a", "fields": [{"name": "x"}, {"name": "y"}]}]}
    for other in (wider, {**more, "scorer": ["a", "n"]}, {"parts": more["parts"]}):
        with pytest.raises(AssertionError, match="differs"):
            check("x", other, may_grow=True)
    with pytest.raises(AssertionError, match="differs"):
        check("x", more)


@pytest.mark.parametrize("name", [*GOLDENS, *SLOW])
def test_every_golden_can_fail(name: str) -> None:
    value = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    check(name, value)
    with pytest.raises(AssertionError, match="differs"):
        check(name, changed(value))


def test_masks_keep_the_length_of_lists() -> None:
    result = {"a": [{"s": 1.5, "t_seconds": 2}], "s": ["one", "two"]}
    assert masked(result, ("s",)) == {"a": [{"s": "*", "t_seconds": "*"}], "s": ["*", "*"]}
