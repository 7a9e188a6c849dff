"""Planner: scores, budgets and protection that it requires of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import a_layer, a_view
from larder import Policy
from larder.core import BudgetError, Observation, ScoreError, ScoreScale, Variant, public_name
from larder.policy import (
    Drop,
    KeyDiff,
    Planner,
    Protect,
    ProtectedTokens,
    Scorer,
    SinksAndWindow,
    SnapKV,
    Uniform,
)


@dataclass(frozen=True)
class Given(Scorer):
    """Returns what it was given."""

    scores: Any

    def score(self, observation: Observation) -> Tensor:
        return self.scores


def planner(scorer: Scorer, protect: Protect | None = None) -> Planner:
    return Planner(protect or Protect(0, 0), scorer, Uniform(), Drop())


SEEN = a_view(a_layer(2, 2, index=3), [range(5), range(3)], 2)


@pytest.mark.parametrize(
    "scores, message",
    [
        (torch.zeros(3), r"shape \(3,\) for layer 3, which holds \(8,\)"),
        (torch.zeros(2, 4), r"shape \(2, 4\) for layer 3, which holds \(8,\)"),
        (torch.zeros(8, dtype=torch.int64), r"torch\.int64 scores for layer 3"),
        (torch.tensor([0.0] * 6 + [torch.nan] * 2), "2 NaN among 8 scores for layer 3"),
    ],
    ids=["length", "dimensions", "whole_numbers", "nan"],
)
def test_scores_of_wrong_shape_or_dtype_or_nan_are_refused(scores, message) -> None:
    with pytest.raises(ScoreError, match=message) as caught:
        planner(Given(scores)).score(SEEN)
    assert str(caught.value).startswith(f"{public_name(Given)} returned")
    assert "\n" not in str(caught.value)


def test_scores_become_float32_and_may_be_infinite() -> None:
    scores = torch.tensor([torch.inf, -torch.inf, *range(6)])
    for kind in (torch.float64, torch.bfloat16, torch.float32):
        got = planner(Given(scores.to(kind))).score(SEEN)
        assert got.dtype is torch.float32
        assert torch.equal(got, scores)


def test_budget_below_protected_tokens_is_refused() -> None:
    wide = SinksAndWindow(sinks=40)
    assert (wide.protected_tokens(), KeyDiff().protected_tokens()) == (
        ProtectedTokens(40, 1),
        ProtectedTokens(),
    )
    with pytest.raises(BudgetError, match=r"40 tokens is smaller than the 41 that") as caught:
        planner(wide).quotas(40, 100, (0, 1), {})
    assert "raise the budget" in str(caught.value) and "\n" not in str(caught.value)
    assert planner(wide).quotas(41, 100, (0, 1), {}) == {0: 41, 1: 41}
    with pytest.raises(BudgetError, match="smaller than sinks \\+ recent"):
        planner(wide, Protect(4, 64)).quotas(60, 100, (0, 1), {})


KEEPERS = {
    "snapkv": (SnapKV(window=32), Protect(sinks=4, recent=0), 36),
    "snapkv_code": (SnapKV(window=32, variant=Variant.CODE), Protect(sinks=4, recent=0), 4),
    "snapkv_within_recent": (SnapKV(window=8), Protect(sinks=4, recent=32), 36),
    "sinks_overlap": (SinksAndWindow(sinks=4), Protect(sinks=6, recent=0), 7),
    "window_overlaps": (SinksAndWindow(sinks=4), Protect(sinks=2, recent=5), 9),
    "recent_is_a_share": (SnapKV(window=8), Protect(sinks=4, recent=0.5), 12),
}


def test_budget_of_one_token_is_singular() -> None:
    whole = planner(SinksAndWindow(sinks=4), Protect(sinks=0, recent=0))
    with pytest.raises(BudgetError, match="budget of 1 token is smaller"):
        whole.quotas(1, 100, (0,), {})


@pytest.mark.parametrize("name", KEEPERS)
def test_accepted_budget_keeps_all_protected_tokens(name) -> None:
    scorer, protect, least = KEEPERS[name]
    whole = planner(scorer, protect)
    with pytest.raises(BudgetError, match=f"budget of {least - 1} tokens is smaller"):
        whole.quotas(least - 1, 100, (0,), {})
    for tokens in range(least, least + 4):
        quotas = whole.quotas(tokens, 100, (0,), {})
        observation = a_view(a_layer(2, 2), [range(100)] * 2, 50)
        judged = whole.with_protection(observation, whole.score(observation), tokens)
        [kept] = whole.plan(
            {0: judged}, quotas, lambda index, observation=observation: observation.entries
        ).values()
        ends = protect.least(tokens).union(scorer.protected_tokens())
        stays = {*range(ends.first), *range(100 - ends.last, 100)}
        for head in (kept.kept[: kept.lengths[0]], kept.kept[kept.lengths[0] :] - 100):
            assert stays <= set(head.tolist())
            assert len(head) == tokens


def test_too_small_budget_names_all_protected_tokens() -> None:
    with pytest.raises(BudgetError) as caught:
        planner(SnapKV(window=32), Protect(sinks=4, recent=0)).quotas(34, 100, (0,), {})
    message = str(caught.value)
    assert "smaller than the 36 that protect(sinks=4, recent=0) and snapkv(window=32" in message
    assert (
        "(4 at the start, 32 at the end): raise the budget, or give either of them less." in message
    )
    assert "\n" not in message


def test_layer_quotas_cover_protected_tokens() -> None:
    from larder.policy import Sensitivity

    whole = Planner(Protect(0, 0), SinksAndWindow(sinks=19), Sensitivity(), Drop())
    quotas = whole.quotas(40, 500, (0, 1, 2), {"sensitivity": (1.0, 0.2, 0.9)})
    assert min(quotas.values()) == 20
    assert sum(quotas.values()) == 120


@pytest.mark.parametrize(
    ("spelling", "scale"),
    [
        ("kvzap()", ScoreScale.LOGARITHMS),
        ("kvzap() > criticality()", ScoreScale.WEIGHTS),
        ("kvzap() > caote()", ScoreScale.WEIGHTS),
        ("keydiff()", ScoreScale.WEIGHTS),
    ],
)
def test_scale_of_scores_weighted_by_values_is_weights(spelling: str, scale: ScoreScale) -> None:
    own = Policy.parse(spelling).with_sizes(4, None).planner
    assert own.with_protection(SEEN, torch.zeros(8), 4).scale is scale
