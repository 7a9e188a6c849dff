"""Calibration split by layer and head, as the planner passes it on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from builders import a_layer, a_view
from larder import Policy
from larder.core import Calibration, ModelError
from larder.policy import Uniform, mean_per_kv_head, split_by_layer

FACTS = {"echo": (0.1, 0.2, 0.3, 0.4), "squeeze": (0.5, 0.6)}


def test_calibration_is_split_by_layer() -> None:
    by_layer = split_by_layer(FACTS, (1, 5))
    assert by_layer == {
        1: {"echo": (0.1, 0.2), "squeeze": (0.5,)},
        5: {"echo": (0.3, 0.4), "squeeze": (0.6,)},
    }
    assert split_by_layer(FACTS, ()) == {}
    assert split_by_layer({}, (0, 1)) == {0: {}, 1: {}}


def test_query_head_calibration_is_averaged_per_kv_head() -> None:
    assert mean_per_kv_head((1.0, 3.0, 5.0, 9.0), 2) == (2.0, 7.0)
    assert mean_per_kv_head((1.0, 3.0), 2) == (1.0, 3.0)
    assert mean_per_kv_head((), 2) == ()


def test_calibration_of_wrong_length_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'echo' has 4 numbers, which 3 managed layers cannot"):
        split_by_layer({"echo": FACTS["echo"]}, (0, 1, 2))
    with pytest.raises(ModelError, match="2 kv heads was calibrated by 3 numbers"):
        mean_per_kv_head((1.0, 2.0, 3.0), 2)


@dataclass(frozen=True)
class Weighing(Uniform):
    """A budget that counts heads by what was measured."""

    def head_weights(self, calibration: Calibration) -> tuple[float, ...]:
        return tuple(10 * value for value in calibration["echo"])


def test_planner_passes_calibration_and_lexicon_to_layers() -> None:
    policy = Policy.parse("snapkv(window=1) > group_max()")
    planner = policy.planner
    planner = type(planner)(planner.protect, planner.scorer, Weighing(), planner.compensation)
    observation = a_view(a_layer(2, 2, index=5), [[0, 1, 2], [0, 2]])
    assert planner.with_model_inputs(observation).calibration == {}
    assert planner.with_protection(observation, torch.zeros(5), 9).weights == ()
    knowing = planner.with_calibration(FACTS, (1, 5), {"ends": frozenset({3})})
    calibrated = knowing.with_model_inputs(observation)
    assert calibrated.calibration == {"echo": (0.3, 0.4), "squeeze": (0.6,)}
    assert calibrated.lexicon == {"ends": frozenset({3})}
    assert knowing.with_protection(calibrated, torch.zeros(5), 9).weights == (3.0, 4.0)
