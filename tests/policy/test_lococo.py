"""Slots that a convolution mixes: hand values, and what gamma of 0 leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_layer, a_plan, some_entries
from larder.core import LayerScores, Phase, ScoreError
from larder.policy import Lococo, slot_weights
from references.lococo import learned_tensors

LAYER = a_layer(1, 2)
KEPT = [[1, 4, 5, 9]]


def judged(gamma: float = 0.4, protected: tuple[int, ...] = ()) -> LayerScores:
    mask = torch.zeros(10, dtype=torch.bool)
    mask[list(protected)] = True
    scores = torch.arange(10.0)
    learned = learned_tensors(LAYER.head_dim, gamma)
    return LayerScores(scores, mask, (10,), phase=Phase.PREFILL, learned=learned)


def test_slot_weights_hand_values() -> None:
    """One channel that looks at the key alone: softmax of ln 1, ln 2 and ln 5 gives eighths."""
    keys = torch.tensor([[[1.0], [2.0], [5.0]]]).log()
    kernel = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]])
    given = torch.zeros_like(keys), torch.tensor([[1]]), kernel, torch.zeros(1)
    found = slot_weights(keys, *given, torch.tensor(0.5))
    torch.testing.assert_close(found, torch.tensor([[[1 / 16, 1 / 2 + 2 / 16, 5 / 16]]]))
    assert slot_weights(keys, *given, torch.tensor(0.0)).tolist() == [[[0.0, 1.0, 0.0]]]


def test_convolution_kernel_reads_neighbors() -> None:
    keys = torch.tensor([[[1.0], [2.0], [5.0]]]).log()
    kernel = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])  # the entry before
    given = torch.zeros_like(keys), torch.tensor([[0]]), kernel, torch.zeros(1)
    found = slot_weights(keys, *given, torch.tensor(1.0))
    torch.testing.assert_close(found, torch.tensor([[[1 / 4, 1 / 4, 2 / 4]]]))


def test_slots_are_the_lowest_unprotected_entries() -> None:
    entries, plan = some_entries(LAYER, [range(10)]), a_plan(KEPT, (10,))
    folds = Lococo().compensate(plan, entries, judged(protected=(1,))).folds
    assert sorted(set(folds.targets.tolist())) == [4, 5]
    assert sorted(set(folds.sources.tolist())) == [0, 2, 3, 4, 5, 6, 7, 8]
    for target in (4, 5):
        total = float(folds.key_weights[folds.targets == target].sum())
        assert total == pytest.approx(1, abs=1e-6)


def test_zero_gamma_and_decode_steps_equal_drop() -> None:
    entries, plan = some_entries(LAYER, [range(10)]), a_plan(KEPT, (10,))
    assert Lococo().compensate(plan, entries, judged(gamma=0.0)) is plan
    generating = replace(judged(), phase=Phase.DECODE)
    assert Lococo().compensate(plan, entries, generating) is plan


def test_missing_convolution_is_refused() -> None:
    entries, plan = some_entries(LAYER, [range(10)]), a_plan(KEPT, (10,))
    with pytest.raises(ScoreError, match="plan through a model's runtime"):
        Lococo().compensate(plan, entries, replace(judged(), learned={}))
