"""Eviction rules of a tier: order, pins and worth of every rule, each against its loop."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from larder.core import BadParameter, Variant, build, parse, spell
from larder.store import (
    EVICTIONS,
    MIN_PAUSES,
    NUM_QUANTILES,
    Candidate,
    CandidateColumns,
    Continuum,
    EvictionPolicy,
    SupersededOrder,
    ToolPauses,
    pause_quantiles,
)
from references.eviction import gdsf as gdsf_loop
from references.eviction.leaving_loop import victims

NAMES = sorted(EVICTIONS.builtin_names())
RULES = pytest.mark.parametrize("name", NAMES)
PAPER = re.compile(r"\(20\d\d\),\s+arXiv:\d{4}\.\d{5}|[Nn]o paper")
NOW = 1000.0


def rule(name: str, **parameters: object) -> EvictionPolicy:
    return EVICTIONS.load(name)(**parameters)


def loop_worths(part: EvictionPolicy, candidates: list[Candidate], now: float) -> list[float]:
    name = type(part).__module__.rpartition(".")[2]
    return import_module(f"references.eviction.{name}").worths(part, candidates, now)


def a(name: str, **more: object) -> Candidate:
    return replace(Candidate(name, 100, 1.0, 10.0), **more)


# What is drawn of each; types are checked at random where it is made, which no strategy may do.
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "bytes": st.sampled_from([1, 64, 4096]),
            "seconds": st.sampled_from([0.25, 1.0, 8.0]),
            "last_used": st.sampled_from([0.0, 900.0, 990.0, NOW]),
            "uses": st.integers(1, 4),
            "clock": st.sampled_from([0.0, 0.01, 2.0]),
            "session": st.sampled_from(["", "a", "b"]),
            "superseded": st.booleans(),
            "pinned_until": st.sampled_from([-math.inf, -math.inf, 500.0, 2000.0]),
            "steps": st.sampled_from([1.0, 2.0, math.inf]),
            "pauses": st.lists(st.sampled_from([0.5, 3.0, 40.0, 2000.0]), max_size=12),
            "wait_seconds": st.sampled_from([0.0, 0.0, 5.0]),
            "back": st.integers(0, 3),
        }
    ),
    min_size=1,
    max_size=9,
)


def crowd(rows: list[dict]) -> list[Candidate]:
    """Candidates of a few sessions, some of which continue an earlier one; ties are common."""
    found = []
    for number, row in enumerate(rows):
        back, pauses = row["back"], tuple(row["pauses"])
        parent = f"n{number - back}" if 0 < back <= number else ""
        result = {name: value for name, value in row.items() if name not in ("back", "pauses")}
        found.append(Candidate(f"n{number}", **result, pauses=pauses, parent=parent))
    return found


@RULES
def test_every_rule_has_a_citation_and_a_spelling(name: str) -> None:
    part = rule(name)
    assert PAPER.search(inspect.getmodule(type(part)).__doc__ or "")
    call = parse(spell(part))[0]
    assert call.name == name and build(EVICTIONS.load(name), call.parameters) == part


@RULES
@given(rows=ROWS)
def test_worth_equals_its_reference(name: str, rows: list[dict]) -> None:
    part, result = rule(name), crowd(rows)
    worths = part.worth(CandidateColumns.of(result), NOW).tolist()
    assert worths == pytest.approx(loop_worths(part, result, NOW))


@RULES
@pytest.mark.parametrize("fate", list(SupersededOrder))
@settings(max_examples=12)
@given(rows=ROWS, wanted=st.sampled_from([1, 100, 5000, 10**6]))
def test_victims_equal_the_reference(
    name: str, fate: SupersededOrder, rows: list[dict], wanted: int
) -> None:
    part, result = rule(name, superseded=fate), crowd(rows)
    held = CandidateColumns.of(result)
    gone = part.select_victims(held, NOW, wanted).rows
    worths = part.worth(held, NOW).tolist()
    assert [result[row].name for row in gone] == victims(part, result, worths, NOW, wanted)


@RULES
@given(rows=ROWS)
def test_order_has_each_candidate_once_and_children_first(name: str, rows: list[dict]) -> None:
    result = crowd(rows)
    gone = rule(name).order(result, NOW)
    assert sorted(one.name for one in gone) == sorted(one.name for one in result)
    indices = {one.name: index for index, one in enumerate(gone)}
    assert all(indices[one.name] < indices[one.parent] for one in result if one.parent)


@RULES
def test_minimal_number_of_victims_is_selected(name: str) -> None:
    result = [a(f"n{number}", last_used=float(number)) for number in range(5)]
    held = CandidateColumns.of(result)
    assert len(rule(name).select_victims(held, NOW, 201).rows) == 3
    assert rule(name).select_victims(CandidateColumns.of([]), NOW, 5).rows == ()


@RULES
def test_superseded_state_is_evicted_first(name: str) -> None:
    best = {"seconds": 9.0, "uses": 9, "steps": 1.0, "last_used": NOW, "session": "s"}
    result = [a("new", session="s"), a("old", superseded=True, **best), a("other")]
    for fate in (SupersededOrder.FIRST, SupersededOrder.INSIDE):
        order = [one.name for one in rule(name, superseded=fate).order(result, NOW)]
        assert order.index("old") < order.index("new")
    assert rule(name).order(result, NOW)[0].name == "old"


def test_superseded_order_alike_ranks_superseded_state_by_worth() -> None:
    result = [a("old", superseded=True, last_used=20.0), a("new")]
    order = rule("lru", superseded=SupersededOrder.ALIKE).order(result, NOW)
    assert [one.name for one in order] == ["new", "old"]


@RULES
def test_pin_is_soft_and_expires(name: str) -> None:
    others = [a(f"n{number}", last_used=20.0 + number, steps=1.0, uses=5) for number in range(8)]
    indices = []
    for until in (NOW + 1, NOW - 600, NOW - 1200, NOW - 60_000):
        result = [a("pinned", pinned_until=until), *others]
        order = [one.name for one in rule(name).order(result, NOW)]
        assert len(order) == 9  # it goes, too
        indices.append(order.index("pinned"))
    unpinned = [one.name for one in rule(name).order([a("pinned"), *others], NOW)]
    assert indices[0] == 8 and indices == sorted(indices, reverse=True)
    assert indices[-1] == unpinned.index("pinned")


def test_pinned_candidates_are_ordered_by_worth() -> None:
    result = [a("late", pinned_until=math.inf, last_used=20.0), a("early", pinned_until=NOW)]
    assert [one.name for one in rule("lru").order(result, NOW)] == ["early", "late"]


@given(rows=ROWS)
def test_gdsf_clock_equals_its_reference(rows: list[dict]) -> None:
    part, result = rule("gdsf"), crowd(rows)
    worths = loop_worths(part, result, NOW)
    for wanted in (1, 100, 10**6):
        found = part.select_victims(CandidateColumns.of(result), NOW, wanted)
        gone = [(result[row], worths[row]) for row in found.rows]
        assert found.clock == pytest.approx(gdsf_loop.clock(gone))


def test_pin_does_not_stop_the_gdsf_clock() -> None:
    result = [a("pinned", pinned_until=2 * NOW), a("dear", seconds=5.0)]
    found = rule("gdsf").select_victims(CandidateColumns.of(result), NOW, 1)
    assert found.rows == (1,) and found.clock == pytest.approx(0.05)


def test_gdsf_evicts_formerly_frequent_candidates() -> None:
    part, clock = rule("gdsf"), 0.0
    often = a("often", uses=6)
    for number in range(12):
        result = [often, a("new", uses=2, clock=clock), a(f"n{number}", clock=clock)]
        found = part.select_victims(CandidateColumns.of(result), NOW, 1)
        if result[found.rows[0]] is often:
            break
        clock = max(clock, found.clock)
    assert result[found.rows[0]] is often and number > 1


def test_marconi_alpha_weights_savings_per_byte() -> None:
    result = [a("dear", seconds=9.0, last_used=100.0), a("recent", last_used=999.0), a("old")]
    assert rule("marconi", alpha=2.0).order(result, NOW)[-1].name == "dear"
    assert rule("marconi", alpha=0.0).order(result, NOW)[-1].name == "recent"


def test_kvflow_without_hints_is_lru() -> None:
    result = [a(f"n{number}", last_used=float(-number % 5)) for number in range(5)]
    assert rule("kvflow").order(result, NOW) == rule("lru").order(result, NOW)


def test_continuum_keeps_sessions_for_the_expected_pause() -> None:
    tool = a("tool", pauses=(2.0,) * 8, bytes=50)
    result = [tool, a("recent", last_used=10.5, bytes=50)]
    part = rule("continuum", load=0.1)
    assert part.order(result, 11.0)[0].name == "recent"
    assert part.order(result, 12.5)[0].name == "tool"  # its time is over
    assert rule("continuum", load=10.0).order(result, 11.0)[0].name == "tool"  # too dear


def test_continuum_ignores_outlier_pauses() -> None:
    tool = a("tool", bytes=50, pauses=(1.0,) * 7 + (500.0,))
    part, result = rule("continuum", load=0.1), [tool, a("b", last_used=10.5, bytes=50)]
    assert part.order(result, 10.9)[0].name == "b"
    assert part.order(result, 11.5)[0].name == "tool"


def test_continuum_has_the_papers_values() -> None:
    result = [a("tool", pauses=(30.0, 1.0, 2.0), seconds=6.0, wait_seconds=8.0), a("other")]
    part, held = Continuum(eta=0.5, variant=Variant.PAPER), CandidateColumns.of(result)
    gains = dict(zip(held.pauses[0], part.gains(held, np.array([0]))[0], strict=True))
    values = {1.0: 10 / 3 - 1, 2.0: 20 / 3 - 2, 30.0: -20.0}
    assert gains == pytest.approx(values)
    for now, expected in ((11.9, "other"), (12.1, "tool")):  # it lives for two seconds
        assert part.order([result[0], replace(result[1], last_used=11.0)], now)[0].name == expected


def test_tools_with_few_pauses_use_those_of_all_tools() -> None:
    pauses = ToolPauses()
    assert pauses.after("test") == ()
    for number in range(MIN_PAUSES):
        pauses.record("test", float(number))
        pauses.record(f"tool {number}", 100.0)
    assert pauses.after("test") == tuple(map(float, range(MIN_PAUSES)))
    assert sorted(pauses.after("new"))[-1] == 100 and len(pauses.after("new")) == 2 * MIN_PAUSES


def test_random_draws_depend_on_time_and_seed() -> None:
    result = [a(f"n{number}") for number in range(40)]
    held, part = CandidateColumns.of(result), rule("random")
    first = {part.select_victims(held, float(time), 1).rows[0] for time in range(60)}
    assert len(first) > 20
    assert part.select_victims(held, 1.0, 1) == part.select_victims(held, 1.0, 1)
    assert (part.worth(held, 1.0) != rule("random", seed=1).worth(held, 1.0)).all()


def test_pause_quantiles_hand_values() -> None:
    assert pause_quantiles([3.0]).tolist() == [3.0] * NUM_QUANTILES
    assert pause_quantiles([float(n) for n in range(1, 17)]).tolist() == list(range(2, 17, 2))
    assert np.isinf(pause_quantiles(())).all()


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("lru", {"half_life": 0.0}, "lru.half_life"),
        ("marconi", {"alpha": -1.0}, "marconi.alpha"),
        ("continuum", {"load": math.nan}, "continuum.load"),
        ("continuum", {"eta": -1.0}, "continuum.eta"),
    ],
)
def test_parameters_out_of_range_are_refused(name: str, parameters: dict, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        rule(name, **parameters)


def test_candidates_must_have_bytes_and_names_of_their_own() -> None:
    with pytest.raises(BadParameter, match="1 byte"):
        a("empty", bytes=0)
    with pytest.raises(BadParameter, match="one name"):
        CandidateColumns.of([a("same"), a("same")])
