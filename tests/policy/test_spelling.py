"""Policy sentences: round trips, and one-line errors for misspelt ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder import LarderError, Policy
from larder.core import BadParameter, Family, SpellingError, UnknownName, public_name, spell
from larder.models import MEASUREMENTS
from larder.policy import (
    REDUCTION_SLOTS,
    Drop,
    Exact,
    Form,
    KeysAlone,
    NoAggregation,
    NoHeadRule,
    PrefillOnly,
    Protect,
    Recompute,
    RetrievalHeads,
)
from larder.prefill import Whole
from larder.session import FAMILIES, PRESETS, SLOTS, Single, check_narrowing, needs_scratch_prompts
from larder.store import CODECS

VALUES: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-2, 5000),
    float: st.floats(allow_nan=True, allow_infinity=True),
    str: st.one_of(st.text(max_size=9), st.sampled_from(["episode", "summarize", "tokens"])),
    type(None): st.none(),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip(name) -> None:
    policy = Policy.parse(name)
    assert Policy.parse(str(policy)) == policy
    assert str(Policy.parse(str(policy))) == str(policy)
    assert Policy.parse(f"  {PRESETS[name]} ") == policy
    sized = policy.with_sizes(512, None)
    for own in (policy, sized):
        assert Policy.parse(own.short) == own
        assert len(own.short) <= len(str(own))


def parts_of(slot: str) -> list[type]:
    if slot == "protect":
        return [Protect]
    return [FAMILIES[slot].load(name) for name in FAMILIES[slot].names()]


# Looked up beforehand: the type checks of these tests draw from `random`, as no strategy may.
PARTS = {slot: [(kind, get_type_hints(kind)) for kind in parts_of(slot)] for slot in SLOTS}


@st.composite
def drafts(draw: st.DrawFn, slot: str) -> tuple[type, dict[str, Any]]:
    """Any part of a slot, and values for some of its parameters."""
    kind, hints = draw(st.sampled_from(PARTS[slot]))
    chosen = [f.name for f in fields(kind) if f.init and draw(st.booleans())]
    return kind, {name: draw(values_of(hints[name])) for name in chosen}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    return st.one_of([option_of(kind) for kind in getattr(hint, "__args__", (hint,))])


def option_of(kind: type) -> st.SearchStrategy[Any]:
    return st.sampled_from(list(kind)) if issubclass(kind, Enum) else VALUES[kind]


def compensation_for(scorer: Any, compensation: Any) -> Any:
    """The compensation, or `drop()` where it adds entries behind a scorer that it refuses."""
    is_refused = compensation.added_entries and not needs_scratch_prompts(scorer)
    return Drop() if is_refused else compensation


@pytest.mark.extended
@given(st.fixed_dictionaries({slot: drafts(slot) for slot in SLOTS}))
def test_any_policy_round_trips(slots) -> None:
    parts = {}
    for slot, (kind, values) in slots.items():
        try:
            parts[slot] = kind(**values)
        except BadParameter:
            parts[slot] = kind()
    parts["compensation"] = compensation_for(parts["scorer"], parts["compensation"])
    if parts["scorer"].default_reduction() is None:
        parts |= {"aggregation": NoAggregation(), "heads": NoHeadRule()}
        parts["values"] = KeysAlone()
    if parts["schedule"].turn_rule.plans_turns:
        parts |= {"session": Single(), "compensation": Drop(), "storage": Exact()}
    if needs_scratch_prompts(parts["scorer"]) or parts["schedule"].turn_rule.plans_turns:
        parts["timing"] = PrefillOnly()
    if not parts["compensation"].offloads:
        parts["recall"] = None
    else:
        parts["storage"] = Exact()
        parts["recall"] = replace(parts["recall"], corrected=0)
    compensation = parts["compensation"]
    is_exact = isinstance(compensation, Recompute) or compensation.sums_rejected
    if is_exact or compensation.added_entries or parts["scorer"].required_ledger().queries:
        parts["storage"] = Exact()
    if isinstance(parts["storage"], Form):
        parts["storage"] = Form("dense")
    if parts["compensation"].separates_streaming_heads:
        parts["budget"] = RetrievalHeads()
    if parts["compensation"].needs_whole_text or parts["unit"].needs_whole_text:
        parts["schedule"] = Whole()
    policy = Policy(**parts)
    try:
        check_narrowing(policy.schedule, policy.planner, policy.compensation, policy.recall)
    except SpellingError:
        policy = replace(policy, schedule=Whole())
    written = str(policy)
    assert Policy.parse(written) == policy
    assert str(Policy.parse(written)) == written


@pytest.mark.parametrize("slot", SLOTS)
def test_every_part_round_trips(slot) -> None:
    for kind in parts_of(slot):
        before = {"recall": "park() > ", **dict.fromkeys(REDUCTION_SLOTS, "snapkv() > ")}
        is_added = slot == "compensation" and bool(kind().added_entries)
        sentence = before.get(slot, "reconstruct() > " * is_added) + spell(kind())
        assert getattr(Policy.parse(sentence), slot) == kind()


@pytest.mark.parametrize("slot", REDUCTION_SLOTS)
def test_given_reduction_is_spelled_and_the_other_keeps_its_default(slot) -> None:
    for kind in parts_of(slot):
        policy = Policy.parse(f"snapkv() > {spell(kind())}")
        assert spell(kind()) in str(policy)
        other = next(name for name in REDUCTION_SLOTS if name != slot)
        assert getattr(policy, other) == getattr(Policy.parse("snapkv"), other)


WRONG = {
    "morph() > compact()": (SpellingError, "judges by queries at their true positions"),
    "criticality(mass=0.9)": (SpellingError, "asks how much attention entries hold, but sinks"),
    'form(name="dens")': (UnknownName, "No cache form named 'dens'. Did you mean 'dense',"),
    'form(name="tiered")': (SpellingError, "gives the cache form 'tiered' none of what it needs"),
    'form(name="compact")': (SpellingError, "gives the cache form 'compact' none of what it"),
    'blockwise() > snapkv() > window(task="found")': (SpellingError, "judges by the end of the"),
    "flat()": (SpellingError, "flat() recalls offloaded entries, but drop() offloads none: write"),
    "recompute() > quantized()": (SpellingError, "recomputes entries as the model made them"),
    "recompute(depth=0)": (BadParameter, "recompute.depth must be at least 1, got 0: the input"),
    "recompute() > flat()": (SpellingError, 'but recompute(held="every", depth=1) offloads none'),
    "park() > mikv()": (SpellingError, "has no slow tier to park entries in: leave it out"),
    "park(host_mib=0)": (BadParameter, "park.host_mib must be at least 1 MiB, got 0"),
    'blockwise() > park(cut="split")': (SpellingError, "cuts a text once, when all of it was read"),
    'whole() > park(cut="budgets", size=0.5)': (BadParameter, "at least 1 budget, got 0.5"),
    'whole() > park(cut="share", size=0)': (BadParameter, "be a share in (0, 1], got 0.0"),
    'park(cut="streaming")': (SpellingError, "pooled() does not tell these from streaming heads"),
    "park(tokens=0)": (BadParameter, "park.tokens must be at least 1, got 0"),
    "park() > flat(tokens=100, page=16)": (BadParameter, "pages of 16 do not divide: give 96"),
    "park() > flat(dense=-1)": (BadParameter, "flat.dense must be at least 0 layers, got -1"),
    "protect(recent=2) > park() > flat(corrected=3)": (
        BadParameter,
        "most the 2 latest tokens that",
    ),
    "patched() > every_step()": (SpellingError, "not read while text is generated"),
    'snapkv(variant="code") > lagged()': (SpellingError, "take another scorer"),
    "cake(tau1=0.001)": (BadParameter, "cake.tau1 must be at least 0.05, got 0.001"),
    "keydiff() > max()": (SpellingError, "uses no attention, so max() has nothing to reduce"),
    "snapkw()": (UnknownName, "Did you mean 'snapkv'"),
    "epicash": (UnknownName, "Did you mean 'epicache'"),
    "icecache() > quantized()": (SpellingError, "icecache is a preset, not a part: write its name"),
    "blockwise() > kvzip": (SpellingError, "as in 'kvzip > quantized(bits=4)'"),
    "snapkv(windw=3)": (UnknownName, "Did you mean 'window'"),
    "drop(now=1)": (UnknownName, "It takes: none"),
    "pooled() > snapkv()": (SpellingError, "out of order: write 'snapkv() > pooled()'"),
    'drop() > patched(prompt="a")': (SpellingError, "write 'patched(prompt=\"a\") > drop()'"),
    "kvzip > drop() > ada()": (SpellingError, "write 'kvzip > ada() > drop()'"),
    "snapkv() > keydiff()": (SpellingError, "snapkv and keydiff are both in the slot 'scorer'"),
    "protect() > protect()": (SpellingError, "protect is given twice, and a policy has one"),
    "SnapKVPress(0.5)": (SpellingError, "kvpress=SnapKVPress(0.5), or take the policy"),
    "KnormPress": (SpellingError, "pass the object, kvpress=KnormPress(...)"),
    "snapkv(compression_ratio=0.5)": (UnknownName, "the budget, 1 - compression_ratio"),
    "snapkv(), pooled()": (SpellingError, 'joined by " > "'),
    "snapkv() | pooled()": (SpellingError, 'joined by " > "'),
    "kvzip;int4": (SpellingError, "it goes wrong at ';int4'"),
    "kvzip:int9": (UnknownName, "Did you mean 'int4'"),
    "snapkv() >": (SpellingError, "it ends too early"),
    "snapkv)": (SpellingError, "a ')' is never opened"),
    "snapkv(window=1.5)": (BadParameter, "must be a whole number, got 1.5"),
    'snapkv(window="3")': (BadParameter, "must be a whole number, got '3'"),
    'snapkv(variant="ours")': (BadParameter, "'larder', 'paper', 'code', got 'ours'"),
    'episodic(together="most")': (BadParameter, "number or one of 'fitting', 'all', got 'most'"),
    "episodic(together=0)": (BadParameter, 'at least 1 cache, "fitting" or "all", got 0'),
    "patched(prompt=3)": (BadParameter, 'must be a "text", got 3'),
    "reconstruct(chunk=0)": (BadParameter, "reconstruct.chunk must be at least 1 token, got 0"),
    "reconstruct(opening=-1)": (BadParameter, "reconstruct.opening must be 0 or more, got -1"),
    "protect(recent=1e999)": (BadParameter, "fraction below 1"),
    "snapkv(window=True)": (SpellingError, "True is not a number"),
    "snapkv(window=wide)": (SpellingError, "wide is not a value"),
    "snapkv(window=keydiff())": (SpellingError, "is not a value"),
    "snapkv(window=[1])": (SpellingError, "is not a number"),
    "snapkv(3)": (SpellingError, "needs its name"),
    "snapkv(**{})": (SpellingError, "needs its name"),
    "snapkv(window=1, window=2)": (SpellingError, "window is given twice"),
    "snapkv() < pooled()": (SpellingError, 'joined by " > "'),
    "snapkv() pooled()": (SpellingError, "does not parse"),
    "snapkv() > 3": (SpellingError, "is not a part"),
    "snapkv()()": (SpellingError, "is not a part"),
    "a.snapkv()": (SpellingError, "is not a part"),
    "lambda: 0": (SpellingError, "does not parse"),
    "(snapkv() > pooled()) > drop()": (SpellingError, "is not a part"),
    "snapkv(window=(1 if 1 else 2))": (SpellingError, "does not parse"),
    "": (SpellingError, "The policy is empty: write a name, or parts as name(parameter=value)"),
    ">": (SpellingError, "does not parse"),
    "snapkv(": (SpellingError, "a '(' is never closed. Write parts as"),
    "snapkv(\n)\x00": (SpellingError, "does not parse"),
    "snapkv(window=" + "(" * 300 + ")" * 300 + ")": (SpellingError, "does not parse"),
    "snapkv(window=" + "-" * 20000 + "1)": (SpellingError, "does not parse"),
    "sensitivity(alpha=1e999)": (BadParameter, "alpha"),
    "pooled(tokens=5, kept=0.5)": (BadParameter, "give one of the two"),
}


@pytest.mark.parametrize("sentence", WRONG, ids=lambda s: repr(s)[:40])
def test_misspelling_errors_are_one_line(sentence) -> None:
    kind, expected = WRONG[sentence]
    with pytest.raises(kind) as caught:
        Policy.parse(sentence)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@given(st.text(max_size=30))
def test_random_text_raises_larder_errors_only(text) -> None:
    try:
        Policy.parse(text)
    except LarderError as error:
        assert "\n" not in str(error)


THIRD_PARTY = """
from dataclasses import dataclass
from larder.policy.scorers.base import Scorer

@dataclass(frozen=True)
class Part(Scorer):
    weight: int = 2

    def score(self, seen):
        return seen.entries.packed_positions().float() * self.weight
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    """A package of someone else's that offers two scorers, one under a name of ours."""
    (tmp_path / "outlandish.py").write_text(THIRD_PARTY)
    info = tmp_path / "outsider-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    points = "[larder.scorer]\noutlandish = outlandish:Part\nsnapkv = outlandish:Part\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outlandish", raising=False)
    return FAMILIES["scorer"]


def test_third_party_part_is_registered(third_party) -> None:
    assert "outlandish" in third_party.names()
    policy = Policy.parse("outlandish(weight=5) > pooled()")
    assert policy.scorer.weight == 5
    assert Policy.parse(str(policy)) == policy


def test_third_party_cannot_replace_a_part(third_party) -> None:
    assert third_party.load("snapkv").__module__ == "larder.policy.scorers.snapkv"
    assert third_party.names().count("snapkv") == 1


def test_part_is_spelled_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "oddly_named.py").write_text(THIRD_PARTY.replace("class Part", "class Norm"))
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    points = "[larder.scorer]\nkeydiff = oddly_named:Norm\nvalue_norm = oddly_named:Norm\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "oddly_named", raising=False)
    policy = Policy.parse("value_norm(weight=3) > pooled()")
    assert " > value_norm(weight=3) > " in str(policy)
    assert Policy.parse(str(policy)) == policy
    with pytest.raises(UnknownName, match="value_norm has no parameter"):
        Policy.parse("value_norm(height=3)")


def test_unregistered_part_is_spelled_by_its_class() -> None:
    @dataclass(frozen=True)
    class Mine(Protect):
        pass

    assert spell(Mine(1, 2)) == "Mine(sinks=1, recent=2)"


@pytest.mark.parametrize("recent", [float("nan"), float("inf"), 1.0, -1])
def test_recent_tokens_out_of_range_are_refused(recent: float) -> None:
    with pytest.raises(BadParameter, match="fraction below 1"):
        Protect(recent=recent)


@pytest.mark.parametrize(
    ("family", "variants"),
    [(CODECS, "larder.store.codecs"), (MEASUREMENTS, "larder.models.measurements")],
)
def test_variant_in_the_file_of_another_part_has_its_name(family: Family, variants: str) -> None:
    names = import_module(variants).VARIANTS
    for name, (file, part) in names.items():
        assert name in family and name in family.names() and file in family.names()
        loaded = family.load(name)
        assert (loaded.__name__, public_name(loaded)) == (part, name)
        assert public_name(family.load(file)) == file


def test_third_party_name_is_unknown_without_its_package() -> None:
    with pytest.raises(UnknownName, match="outlandish"):
        FAMILIES["scorer"].load("outlandish")
