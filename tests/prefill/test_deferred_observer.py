"""A pass that is shown when it is over: everything, in order, and nothing before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from larder import Policy
from larder.engine import SamplingParams, StoppingCriteria
from larder.engine.generate import generate
from larder.models import LayerActivations, wrap_model
from larder.prefill import DeferredObserver, PeakMemoryMeter
from larder.session import build_caches, decode_planner
from model_runs import id_runtime, some_ids
from tiny_models import tiny

TOLD = [(row, layer) for layer in range(3) for row in range(2)]


def recorded(mark: int) -> LayerActivations:
    some = torch.full((1, 1, 1), float(mark))
    return LayerActivations(some, some, some, torch.tensor([mark]))


def test_deferred_observer_gets_all_calls_in_order_after_the_pass() -> None:
    heard: list[tuple[int, int, int]] = []
    watching = DeferredObserver(
        lambda row, layer, made: heard.append((row, layer, int(made.positions[0]))), len(TOLD)
    )
    for mark, (row, layer) in enumerate(TOLD):
        assert heard == []
        watching(row, layer, recorded(mark))
    assert heard == [(row, layer, mark) for mark, (row, layer) in enumerate(TOLD)]


@pytest.mark.parametrize("storage, is_afterwards", [("exact", True), ("compact", False)])
def test_single_tokens_are_observed_after_the_pass_where_observing_copies_nothing(
    storage: str, is_afterwards: bool
) -> None:
    sentence = f"blockwise(tokens=8) > protect(sinks=1, recent=2) > column_mass() > {storage}() > "
    policy = Policy.parse(sentence + "every_step()").with_sizes(12, None)
    decoder = wrap_model(tiny("qwen3", layers=2))
    runtime = id_runtime(decoder)
    cache = build_caches(runtime, policy, some_ids(20), [{}], PeakMemoryMeter()).activate(0)
    tended, kinds = decode_planner(runtime, policy, [cache]), []

    def observing(*args: Any) -> Any:
        observer = tended.observer(*args)
        kinds.append(isinstance(observer, DeferredObserver))
        return observer

    generate(
        decoder,
        [cache],
        [some_ids(3)],
        SamplingParams(),
        StoppingCriteria(3),
        make_observer=observing,
    )
    assert kinds == [False, is_afterwards, is_afterwards]
