"""Parts behind a preset's name: added, replaced or changed in the sentence of the preset."""

from __future__ import annotations

import pytest

from larder import LarderError, Policy
from larder.core import Call, parse
from larder.session import FAMILIES, PRESETS, SLOTS

ADDED = (
    "blockwise()",
    "protect(sinks=8)",
    "keydiff()",
    "global()",
    "park()",
    "quantized(bits=8)",
    "every_step()",
)
NAMES = {name for family in FAMILIES.values() for name in family.builtin_names()}
BOTH = sorted(NAMES.intersection(PRESETS))


def slot(name: str) -> str:
    return next(
        (own for own, family in FAMILIES.items() if name in family.builtin_names()), "protect"
    )


def spliced(preset: str, added: str) -> str:
    """Reference: the parts of a preset in a list, with one put in its place by hand."""
    [new] = parse(added)
    own, parts = slot(new.name), list[Call]()
    for old in parse(PRESETS[preset]):
        if slot(old.name) == own and old.name == new.name:
            new = Call(new.name, old.parameters | new.parameters)
        elif slot(old.name) != own:
            parts.append(old)
    replaced = all(new.name != old.name for old in parse(PRESETS[preset]))
    if replaced and own == "scorer":
        parts = [old for old in parts if slot(old.name) not in ("aggregation", "heads")]
    if replaced and own == "compensation":
        parts = [old for old in parts if slot(old.name) != "recall"]
    parts.append(new)
    return " > ".join(str(part) for part in sorted(parts, key=lambda c: SLOTS.index(slot(c.name))))


def parsed(sentence: str) -> str:
    try:
        return str(Policy.parse(sentence))
    except LarderError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("preset", PRESETS)
def test_part_after_a_preset_replaces_its_slot(preset) -> None:
    results = {added: parsed(f"{preset} > {added}") for added in ADDED}
    assert results == {added: parsed(spliced(preset, added)) for added in ADDED}
    assert results["quantized(bits=8)"].count("quantized") <= 1


def test_added_part_keeps_the_others() -> None:
    assert Policy.parse("kvzip > quantized(bits=4)") == Policy.parse(
        "whole() > reconstruct() > global() > quantized(bits=4)"
    )


def test_repeated_part_keeps_unnamed_parameters() -> None:
    policy = Policy.parse("epicache > sensitivity(alpha=3)")
    assert (policy.budget.alpha, policy.budget.floor) == (3, 0.015)


def test_replacing_a_part_removes_its_dependents() -> None:
    assert Policy.parse("cake > keydiff()").scorer == Policy.parse("keydiff()").scorer
    assert Policy.parse("icecache > drop()").recall is None
    assert Policy.parse("cake > snapkv(window=64)").heads == Policy.parse("cake").heads


@pytest.mark.parametrize("name", BOTH)
def test_first_name_without_parentheses_is_a_preset(name) -> None:
    schedule = PRESETS[name].partition(" > ")[0]
    assert parsed(f"{name} > {schedule}") == parsed(name) == parsed(PRESETS[name])


def test_name_without_parentheses_that_is_no_preset_is_a_part() -> None:
    assert Policy.parse("reconstruct > global()") == Policy.parse("reconstruct() > global()")


def test_parentheses_select_the_part_over_the_preset() -> None:
    assert "> ada(" in str(Policy.parse("expected > quantized()"))
    assert "> pooled(" in str(Policy.parse("expected() > quantized()"))


def test_variants_of_tables_are_policies_wherever_one_is_parsed() -> None:
    for variant, sentence in (
        ("kvzip:int4", "kvzip > quantized(bits=4)"),
        ("kivi:int4", PRESETS["kivi"].replace("quantized(bits=2)", "quantized(bits=4)")),
        ("h2o_blockwise:whole", "h2o"),
        ("kivi:blockwise:exact", "kivi > blockwise() > exact()"),
        ("d2o:drop > quantized(bits=8)", "d2o > drop() > quantized(bits=8)"),
        (" kvzip:int4 > quantized(group=32)", "kvzip > quantized(bits=4, group=32)"),
    ):
        assert Policy.parse(variant) == Policy.parse(sentence), variant


def test_variant_replaces_a_part_with_all_its_parameters() -> None:
    assert "sensitivity(floor=0.015)" in PRESETS["epicache"]
    assert Policy.parse("epicache:floored").short.endswith("> sensitivity()")


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("kvzip:int5", "No variant of a preset named 'int5'. Did you mean 'int4'"),
        ("kwzip:int4", "No preset with variants named 'kwzip'. Did you mean 'kvzip"),
        ("quantized:int4", "No preset with variants named 'quantized'"),
        ("kvzip:", "does not parse"),
        ("kvzip : int4", "does not parse"),
    ],
)
def test_unknown_variants_are_refused(sentence: str, message: str) -> None:
    with pytest.raises(LarderError) as refused:
        Policy.parse(sentence)
    assert message in str(refused.value)
