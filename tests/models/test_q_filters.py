"""Directions of queries: a singular vector of each head, on the side of most queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import a_layer, a_view
from larder.core import BadParameter
from larder.models import QFiltersMeasurement, query_directions, wrap_model
from larder.policy import QFilters as Scorer
from measurements import SAMPLE
from model_attention import heads_of
from tiny_models import tiny


def test_directions_are_singular_vectors_of_queries() -> None:
    part = QFiltersMeasurement(tokens=24, skipped=2)
    with wrap_model(tiny("llama", layers=2)) as decoder:
        expected = []
        for heads in heads_of(decoder, SAMPLE.ids(24)):
            directions = []
            for queries in heads.queries[:, 2:]:
                vector = torch.linalg.svd(queries)[2][0]
                positive = sum(float(query @ vector) > 0 for query in queries)
                directions.append(vector if 2 * positive >= len(queries) else -vector)
            for first in range(0, len(directions), heads.group):
                expected += (sum(directions[first : first + heads.group]) / heads.group).tolist()
        got = part.measure(decoder, SAMPLE)
    assert got == pytest.approx(expected, abs=1e-4)
    assert len(got) == 2 * 2 * 16


def test_direction_has_the_sign_of_most_queries() -> None:
    source = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 40, 8, generator=source)
    queries[..., 3] -= 5
    [direction] = query_directions(queries)
    assert float(direction[3]) < -0.9 and float(direction.norm()) == pytest.approx(1, abs=1e-5)


def test_each_head_has_its_own_direction() -> None:
    observation = a_view(a_layer(2, 1), [range(5), range(3)], 1)
    axes = torch.eye(8)[[2, 5]].flatten().tolist()
    scores = Scorer().score(replace(observation, calibration={"q_filters": tuple(axes)}))
    keys = observation.entries
    assert scores[:5].tolist() == keys.head_keys(0)[:, 2].tolist()
    assert scores[5:].tolist() == keys.head_keys(1)[:, 5].tolist()


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(BadParameter, match="0 <= skipped < tokens, got"):
        QFiltersMeasurement(tokens=4, skipped=4)
