"""Help, policies, HTTP, errors and names are as their goldens."""

from __future__ import annotations

import json

import pytest

from golden import comparison, help_texts, policies, surface
from golden.comparison import Golden, check, differences, masked

GOLDENS = {**help_texts.GOLDENS, **policies.GOLDENS, **surface.GOLDENS}


@pytest.mark.parametrize("name", GOLDENS)
def test_unchanged(name: str) -> None:
    golden: Golden = GOLDENS[name]
    check(name, golden())


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


def test_a_changed_golden_fails(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "FIXTURES", tmp_path)
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    check("x", {"a": 1})
    with pytest.raises(AssertionError, match=r"x\.json differs:\n\$\.a: 2, not 1"):
        check("x", {"a": 2})


def test_masks_keep_the_length_of_lists() -> None:
    told = {"a": [{"s": 1.5, "t": 2}], "s": ["one", "two"]}
    assert masked(told, ("s",)) == {"a": [{"s": "*", "t": 2}], "s": ["*", "*"]}
