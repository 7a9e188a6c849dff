"""What becomes of the rejected, and what no score can cost its place."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import a_layer, a_plan, some_entries
from larder.core.errors import BadParameter, BudgetError
from larder.core.plan import Fate, Plan
from larder.policy.ends import Ends
from larder.policy.protect import Protect


def test_a_compensation_equals_its_loop(compensation, loop_of) -> None:
    entries = some_entries(a_layer(2, 2), [range(8), range(2, 8)])
    plan = a_plan([[0, 3, 7], []], (8, 6))
    before = plan.kept.clone()
    settled = compensation.settle(plan, entries)
    assert settled.kept.tolist() == loop_of(compensation).settle([0, 3, 7])
    assert settled.lengths == (3, 0)
    assert torch.equal(plan.kept, before)
    assert isinstance(compensation.fate, Fate)
    assert compensation.settle(plan, entries) == settled
    said = inspect.getmodule(type(compensation)).__doc__
    assert "arXiv:" in said or "o paper" in said


def test_a_plan_from_a_mask_counts_each_head() -> None:
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
        assert protect.least(tokens) == Ends(sinks, latest)
    else:
        with pytest.raises(BudgetError, match=f"budget of {tokens} tokens is smaller"):
            protect.least(tokens)


@pytest.mark.parametrize("sinks, recent", [(-1, 0), (0, -1), (0, 1.0), (0, -0.5)])
def test_protection_out_of_range_is_refused(sinks, recent) -> None:
    with pytest.raises(BadParameter, match=r"protect\."):
        Protect(sinks, recent)
