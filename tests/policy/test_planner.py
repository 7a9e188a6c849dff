"""What a planner asks of its parts, and refuses to take from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import a_layer, a_view
from larder.core.errors import BudgetError, ScoreError
from larder.core.observation import Seen
from larder.core.spelling import name_of
from larder.policy.budgets.uniform import Uniform
from larder.policy.compensation.drop import Drop
from larder.policy.planner import Planner
from larder.policy.protect import Protect
from larder.policy.scorers.base import Scorer
from larder.policy.scorers.keydiff import KeyDiff
from larder.policy.scorers.sinks_and_window import SinksAndWindow


@dataclass(frozen=True)
class Given(Scorer):
    """Returns what it was given."""

    scores: Any

    def score(self, seen: Seen) -> Tensor:
        return self.scores


def planner(scorer: Scorer, protect: Protect | None = None) -> Planner:
    return Planner(protect or Protect(0, 0), scorer, Uniform(), Drop())


SEEN = a_view(a_layer(2, 2, index=3), [range(5), range(3)], 2)


@pytest.mark.parametrize(
    "scores, said",
    [
        (torch.zeros(3), r"shape \(3,\) for layer 3, which holds \(8,\)"),
        (torch.zeros(2, 4), r"shape \(2, 4\) for layer 3, which holds \(8,\)"),
        (torch.zeros(8, dtype=torch.int64), r"torch\.int64 scores for layer 3"),
        (torch.tensor([0.0] * 6 + [torch.nan] * 2), "2 NaN among 8 scores for layer 3"),
    ],
    ids=["length", "dimensions", "whole_numbers", "nan"],
)
def test_scores_that_cannot_be_ranked_are_refused(scores, said) -> None:
    with pytest.raises(ScoreError, match=said) as caught:
        planner(Given(scores)).score(SEEN)
    assert str(caught.value).startswith(f"{name_of(Given)} returned")
    assert "\n" not in str(caught.value)


def test_scores_become_float32_and_may_be_infinite() -> None:
    scores = torch.tensor([torch.inf, -torch.inf, *range(6)])
    for kind in (torch.float64, torch.bfloat16, torch.float32):
        got = planner(Given(scores.to(kind))).score(SEEN)
        assert got.dtype is torch.float32
        assert torch.equal(got, scores)


def test_a_budget_must_hold_what_a_scorer_always_keeps() -> None:
    wide = SinksAndWindow(sinks=40)
    assert (wide.least(), KeyDiff().least()) == (41, 0)
    with pytest.raises(BudgetError, match=r"40 tokens is smaller than the 41 that") as caught:
        planner(wide).quotas(40, 100, (0, 1), {})
    assert "raise --budget" in str(caught.value) and "\n" not in str(caught.value)
    assert planner(wide).quotas(41, 100, (0, 1), {}) == {0: 41, 1: 41}
    with pytest.raises(BudgetError, match="smaller than sinks \\+ recent"):
        planner(wide, Protect(4, 64)).quotas(60, 100, (0, 1), {})


def test_layers_get_no_less_than_a_scorer_always_keeps() -> None:
    from larder.policy.budgets.sensitivity import Sensitivity

    whole = Planner(Protect(0, 0), SinksAndWindow(sinks=19), Sensitivity(), Drop())
    quotas = whole.quotas(40, 500, (0, 1, 2), {"sensitivity": (1.0, 0.2, 0.9)})
    assert min(quotas.values()) == 20
    assert sum(quotas.values()) == 120
