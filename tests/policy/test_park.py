"""Entries that a cut drops before the others are parked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_layer, a_plan, some_entries
from larder.core import LayerScores, Phase
from larder.policy import Cut, Park
from references.park import dropped, split

HELD, KEPT = [range(30), range(4, 30)], [[0, 3, 7, 29], [0, 20, 25]]


def scored(phase: Phase = Phase.PREFILL) -> LayerScores:
    source = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 9, (56,), generator=source).float()
    return LayerScores(scores, torch.zeros(56, dtype=torch.bool), (30, 26), phase=phase)


@pytest.mark.parametrize(
    ("part", "stays"),
    [
        (Park(cut=Cut.SPLIT, tokens=8), split(30, 8)),
        (Park(cut=Cut.BUDGETS, size=1.5, tokens=8), 12),
        (Park(cut=Cut.SHARE, size=0.75), 23),
        (Park(cut=Cut.SHARE, size=0.05), 2),  # fewer than stay in the fast tier
    ],
)
def test_cut_drops_the_lowest_scores_of_each_head(part, stays) -> None:
    entries, judged = some_entries(a_layer(2, 2), HELD), scored()
    plan = a_plan(KEPT, entries.lengths)
    settled = part.compensate(plan, entries, judged)
    scores = [head.tolist() for head in torch.split(judged.scores, [30, 26])]
    one, other = dropped(scores, KEPT, stays)
    assert one and settled.dropped.tolist() == [*one, *(30 + s for s in other)]
    assert torch.equal(settled.kept, plan.kept)


def test_no_drops_during_decoding_or_without_a_cut() -> None:
    entries = some_entries(a_layer(2, 2), HELD)
    plan = a_plan(KEPT, entries.lengths)
    cutting = Park(cut=Cut.SHARE, size=0.5)
    assert not len(cutting.compensate(plan, entries, scored(Phase.DECODE)).dropped)
    assert not len(Park().compensate(plan, entries, scored()).dropped)


@pytest.mark.parametrize("held", [4, 8, 9, 100, 1500, 128_000])
def test_split_cut_equals_rocketkv(held) -> None:
    left = Park(cut=Cut.SPLIT, tokens=8).remaining(held)
    assert left == split(held, 8)
    assert min(held, 8) <= left <= held


def test_open_budget_is_filled_by_the_policy() -> None:
    assert Park(cut=Cut.SPLIT).with_budget(64) == Park(cut=Cut.SPLIT, tokens=64)
    assert Park(cut=Cut.SPLIT, tokens=9).with_budget(64).tokens == 9
    assert Park().with_budget(64) == Park() != replace(Park(), tokens=64)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(("weights", "head"), [((1.0, 0.0), 1), ((0.0, 0.5), 0)])
def test_streaming_heads_drop_evicted_entries(weights, head, phase) -> None:
    entries, judged = some_entries(a_layer(2, 2), HELD), replace(scored(phase), weights=weights)
    settled = Park(cut=Cut.STREAMING).compensate(a_plan(KEPT, entries.lengths), entries, judged)
    lost = [s for s in range(len(HELD[head])) if s not in KEPT[head]]
    assert settled.dropped.tolist() == [30 * head + s for s in lost]
