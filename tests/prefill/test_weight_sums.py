"""Sums of attention recorded with a block: the same kept entries as by a second pass."""

from __future__ import annotations

import pytest
import torch

from larder import Policy
from larder.cache import SequenceCache
from larder.models import wrap_model
from larder.policy.tallies import _attention_weights, mass
from larder.prefill import PeakMemoryMeter
from larder.session import build_caches
from model_runs import id_runtime, some_ids
from tiny_models import tiny

SENTENCES = [
    "protect(sinks=0, recent=0.5) > column_mass() > uniform()",
    "protect(sinks=4, recent=0.25) > column_mass() > inverse_variance() > fold_ema()",
]


def read(sentence: str) -> SequenceCache:
    policy = Policy.parse(f"blockwise(tokens=48) > {sentence}").with_sizes(60, 48)
    runtime = id_runtime(wrap_model(tiny("qwen3", layers=3)))
    return build_caches(runtime, policy, some_ids(300), [{}], PeakMemoryMeter()).activate(0)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_recorded_sums_equal_a_second_pass(sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    second_passes: list[int] = []

    def counted(*inputs: object) -> object:
        second_passes.append(1)
        return update(*inputs)

    update = _attention_weights.update_columns
    monkeypatch.setattr(mass, "update_columns", counted)
    recorded = read(sentence)
    assert not second_passes
    monkeypatch.setattr(mass.Mass, "sums_weights", False)
    expected = read(sentence)
    assert second_passes
    for layer in range(3):
        own, others = recorded.entries(layer), expected.entries(layer)
        assert own.lengths == others.lengths
        assert torch.equal(own.packed_positions(), others.packed_positions())
        assert torch.allclose(own.column("mass"), others.column("mass"), 1e-3, 1e-4)
