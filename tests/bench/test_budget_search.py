"""The budget search returns the largest budget within the bytes, approximately."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from larder.core import BudgetError
from larder_bench.studies.target_size import TOLERANCE, TRIES, search_budget

MOST = 2000


def slow_best(per_token: float, fixed: int, wanted: int) -> int | None:
    """Largest budget within the bytes, by exhaustive search."""
    fitting = [t for t in range(1, MOST + 1) if int(per_token * t) + fixed <= wanted]
    return max(fitting, default=None)


@given(
    per_token=st.floats(0.5, 60),
    fixed=st.integers(0, 300),
    wanted=st.integers(200, 40_000),
    first=st.integers(1, 3000),
)
@example(per_token=3.5, fixed=187, wanted=200, first=12)
def test_search_is_near_the_optimum(per_token: float, fixed: int, wanted: int, first: int) -> None:
    tried: list[int] = []

    def make(tokens: int) -> int:
        tried.append(tokens)
        return int(per_token * tokens) + fixed

    best = slow_best(per_token, fixed, wanted)
    if best is None:
        with pytest.raises(BudgetError, match=str(wanted)):
            search_budget(make, int, wanted, first, MOST)
        return
    found = search_budget(make, int, wanted, first, MOST)
    assert found.result == make(found.tokens) <= wanted
    assert found.tries == len(tried) - 1 <= TRIES
    assert found.tokens == best or found.result >= (1 - TOLERANCE) * wanted


def test_refused_budgets_count_as_too_small() -> None:
    def make(tokens: int) -> int:
        if tokens < 40:
            raise BudgetError(f"{tokens} are too few")
        return 2 * tokens

    assert search_budget(make, int, 100, 10, MOST).tokens in (49, 50)
    with pytest.raises(BudgetError, match="are too few"):
        search_budget(make, int, 70, 35, MOST)


def test_exact_guess_needs_one_try() -> None:
    assert search_budget(lambda tokens: 5 * tokens, int, 500, 99, MOST).tries == 1


def test_maximum_is_returned_when_everything_fits() -> None:
    assert search_budget(lambda tokens: tokens, int, 10 * MOST, 7, MOST).tokens == MOST
