"""Layers that share scores keep the same entries, and only those that hold the same do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_layer, a_view
from larder import Policy
from larder.core import Packed
from larder.prefill import Blockwise, SharedLayerScores, no_progress
from model_runs import some_ids

HELD = [[0, 1, 4], [2, 4]]
SENTENCE = "protect(sinks=1, recent=2) > snapkv(window=2, kernel=1) > {unit} > {budget}"


class CountingScore:
    """Counts how often it is asked, and never says the same."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, observation) -> Packed:
        self.asked += 1
        return torch.full((sum(observation.entries.lengths),), float(self.asked))


def test_first_layer_of_a_group_scores_for_it() -> None:
    leading, score, seen = SharedLayerScores(2), CountingScore(), a_view(a_layer(2, 2), HELD)
    results = [float(leading.scores(0, index, seen, score)[0]) for index in range(5)]
    assert results == [1, 1, 2, 2, 3]
    results = [float(SharedLayerScores(1).scores(0, index, seen, score)[0]) for index in range(2)]
    assert results == [4, 5]


def test_sequences_of_a_batch_have_their_own_leaders() -> None:
    leading, score, seen = SharedLayerScores(2), CountingScore(), a_view(a_layer(2, 2), HELD)
    results = [
        [float(leading.scores(row, index, seen, score)[0]) for row in (0, 1)] for index in (0, 1)
    ]
    assert results == [[1, 2], [1, 2]]


@pytest.mark.parametrize("other", [[[0, 1, 3], [2, 4]], [[0, 1], [2, 3, 4]], [[0, 1, 4], [4]]])
def test_layer_with_other_entries_scores_itself(other) -> None:
    leading, score, layer = SharedLayerScores(3), CountingScore(), a_layer(2, 2)
    seen, apart = a_view(layer, HELD), a_view(layer, other)
    results = [
        leading.scores(0, index, view, score) for index, view in enumerate((seen, apart, seen))
    ]
    assert [float(scores[0]) for scores in results] == [1, 2, 1]
    assert len(results[1]) == sum(apart.entries.lengths)


def kept(watched, reader_for, lane_for, unit: str, budget: str = "uniform()") -> list[list[int]]:
    planner = Policy.parse(SENTENCE.format(unit=unit, budget=budget)).planner
    reader, lane = reader_for(watched, planner, 12, 50), lane_for(watched, planner)
    Blockwise(8).read(reader, [lane], some_ids(50), no_progress)
    return [
        lane.cache.entries(layer.index).packed_positions().tolist()
        for layer in watched.spec.managed
    ]


@pytest.mark.parametrize("unit", ["chunk(size=3, layers={})", "window(size=3, layers={})"])
def test_sharing_layers_keep_the_same_entries(watched, reader_for, lane_for, unit) -> None:
    fixtures = watched, reader_for, lane_for
    alone, paired, all_three = (kept(*fixtures, unit.format(layers)) for layers in (1, 2, 3))
    assert alone[0] == paired[0] == all_three[0]
    assert alone[1] != alone[0] and alone[2] not in alone[:2]
    assert paired[1] == paired[0] != paired[2]
    assert all_three[0] == all_three[1] == all_three[2]


def test_uneven_layer_budgets_disable_sharing(watched, reader_for, lane_for) -> None:
    fixtures = watched, reader_for, lane_for
    shared = kept(*fixtures, "chunk(size=3, layers=3)", "pyramid(beta=2)")
    assert len({len(layer) for layer in shared}) == 3


def test_scores_are_shared_on_request_only() -> None:
    planner = Policy.parse("snapkv()").planner
    assert planner.unit.layers_together == 1
    unit = Policy.parse("snapkv() > chunk(layers=2)").planner.unit
    assert unit.layers_together == 2
    assert replace(unit, layers=1).layers_together == 1
