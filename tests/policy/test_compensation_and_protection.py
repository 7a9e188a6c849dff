"""Compensation of rejected entries, and protection by position."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import a_layer, a_plan, some_columns, some_entries
from larder.cache import merge_entries
from larder.core import BadParameter, BudgetError, Entries, LayerScores, Phase, Plan
from larder.policy import Protect, ProtectedTokens
from references.lococo import learned_tensors
from references.outcome import Entry, Outcome, untouched
from references.restorekv import learned_entries

# What each head held, and which of its entries stay.
CASES = {
    "uneven": ([range(9), range(2, 9)], [[0, 3, 7, 8], [1, 2, 6]]),
    "a_head_loses_all": ([range(6), range(6)], [[0, 5], []]),
    "nothing_goes": ([range(4), range(3)], [[0, 1, 2, 3], [0, 1, 2]]),
    "one_for_each_that_comes": ([range(12)], [[*range(5), *range(6, 12)]]),
}
# Every case in both stages, and with both memories; all four together in the first.
PAIRS = [(Phase.PREFILL, "unwritten"), (Phase.DECODE, "written")]
JUDGED = [
    *((case, *pair) for case in CASES for pair in PAIRS),
    ("uneven", Phase.PREFILL, "written"),
    ("uneven", Phase.DECODE, "unwritten"),
]


def judged(compensation, case: str, phase: Phase, remembered: str) -> tuple[Entries, LayerScores]:
    """Entries with all that the part has the cache remember, and how they were judged."""
    held, kept = CASES[case]
    layer, source = a_layer(len(held), 2), torch.Generator().manual_seed(5)
    entries = some_entries(layer, held)
    columns = some_columns(len(entries.keys), 1)
    for name in compensation.required_ledger().columns:
        drawn = torch.rand(len(entries.keys), generator=source)
        columns[name] = drawn if remembered == "written" else torch.zeros_like(drawn)
    scalars = {
        name: torch.full((len(held),), torch.nan) for name in compensation.required_ledger().scalars
    }
    if remembered == "written":
        scalars = {name: torch.rand(len(held), generator=source) for name in scalars}
    entries = replace(entries, columns=columns, scalars=scalars)
    total = sum(entries.lengths)
    scores = torch.rand(total, generator=source)
    protected = torch.zeros(total, dtype=torch.bool)
    protected[a_plan(kept, entries.lengths).kept[:1]] = True
    scored = LayerScores(scores, protected, entries.lengths, scalars=scalars, phase=phase)
    learned = learned_tensors(layer.head_dim) | learned_entries(len(held), layer.head_dim)
    return entries, replace(scored, learned=learned)


def carried_out(plan: Plan, entries: Entries) -> Outcome:
    """Entries of a layer after a plan, as the reference loops represent them."""
    heads = torch.split(plan.kept, list(plan.lengths))
    firsts = [sum(entries.lengths[:h]) for h in range(len(heads))]
    kept = [(part - first).tolist() for part, first in zip(heads, firsts, strict=True)]
    outcome, merged = untouched(entries, kept), merge_entries(plan, entries)
    flat = [entry for head in outcome.heads for entry in head]
    positions = {index: position for position, index in enumerate(plan.kept.tolist())}
    for target, key, value in zip(merged.targets, merged.keys, merged.values, strict=True):
        entry = flat[positions[int(target)]]
        entry.key, entry.value = key.tolist(), value.tolist()
    for name, column in plan.columns.items():
        for entry, number in zip(flat, column.tolist(), strict=True):
            entry.columns[name] = number
    outcome.scalars = {name: held.tolist() for name, held in plan.scalars.items()}
    if plan.added is not None:
        positions = plan.added.positions.tolist()
        sides = zip(plan.added.keys.tolist(), plan.added.values.tolist(), strict=True)
        outcome.added = [
            [Entry(*own) for own in zip(positions, *pair, strict=True)] for pair in sides
        ]
    return outcome


def flat(outcome: Outcome) -> list[float]:
    """Every number of an outcome."""
    numbers: list[float] = []
    for entry in (entry for head in (*outcome.heads, *outcome.added) for entry in head):
        numbers += [entry.kept, *entry.key, *entry.value]
        numbers += [entry.columns[name] for name in sorted(entry.columns)]
    for name in sorted(outcome.scalars):
        numbers += outcome.scalars[name]
    return numbers


@pytest.mark.parametrize("case, phase, remembered", JUDGED)
def test_compensation_equals_its_reference(compensation, loop_of, case, phase, remembered) -> None:
    entries, scored = judged(compensation, case, phase, remembered)
    plan = a_plan(CASES[case][1], entries.lengths)
    before = [plan.kept.clone(), entries.keys.clone(), entries.values.clone()]
    settled = compensation.compensate(plan, entries, scored)
    expected = loop_of(compensation).settle(compensation, entries, scored, CASES[case][1])
    assert [len(head) for head in expected.heads] == list(settled.lengths)
    got = carried_out(settled, entries)
    assert set(got.scalars) == set(expected.scalars)
    assert flat(got) == pytest.approx(flat(expected), rel=1e-4, abs=1e-5, nan_ok=True)
    after = [plan.kept, entries.keys, entries.values]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_compensation_cites_its_paper(compensation) -> None:
    citation = inspect.getmodule(type(compensation)).__doc__
    assert "arXiv:" in citation or "PMLR" in citation or "o paper" in citation


def test_plan_from_a_mask_counts_each_head() -> None:
    mask = torch.tensor([True, False, True, False, False, True])
    plan = Plan.from_mask(mask, (3, 2, 1))
    assert (plan.kept.tolist(), plan.lengths) == ([0, 2, 5], (2, 0, 1))


@given(
    sinks=st.integers(0, 5),
    recent=st.one_of(st.integers(0, 9), st.floats(0, 0.99)),
    positions=st.lists(st.integers(0, 29), max_size=20),
    length=st.integers(0, 30),
    tokens=st.integers(1, 40),
)
def test_protection_is_by_true_position(sinks, recent, positions, length, tokens) -> None:
    protect = Protect(sinks, recent)
    latest = int(recent * tokens) if isinstance(recent, float) else recent
    mask = protect.mask(torch.tensor(positions, dtype=torch.int32), length, tokens)
    assert mask.tolist() == [p < sinks or p >= length - latest for p in positions]
    if sinks + latest <= tokens:
        assert protect.least(tokens) == ProtectedTokens(sinks, latest)
    else:
        with pytest.raises(BudgetError, match=rf"budget of {tokens} tokens? is smaller"):
            protect.least(tokens)


@pytest.mark.parametrize("sinks, recent", [(-1, 0), (0, -1), (0, 1.0), (0, -0.5)])
def test_protection_out_of_range_is_refused(sinks, recent) -> None:
    with pytest.raises(BadParameter, match=r"protect\."):
        Protect(sinks, recent)
