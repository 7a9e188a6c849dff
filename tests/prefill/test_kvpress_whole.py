"""A press run by kvpress and by us keeps the same entries; a scorer sees what it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from builders import runnable
from kvpress_hooks import ARCHITECTURES, read_by_kvpress, with_hooks
from larder import Policy
from larder.cache import SequenceCache
from larder.core import Observation, OffloadSpec, Packed
from larder.models import wrap_model
from larder.policy import Drop, Kvpress, Planner, Protect, Scorer, Uniform
from larder.prefill import Blockwise, PrefillSequence, Whole, no_progress
from larder.prefill.schedules import whole as whole_module
from larder.recall import Flat
from model_runs import read_and_evict, some_ids
from tiny_models import tiny

CONTEXT, KEPT = 80, 20
IDS = some_ids(CONTEXT)
PRESSES = [
    "CURPress()",
    "CapPress()",
    "ExpectedAttentionPress()",
    "KeyDiffPress()",
    "KnormPress()",
    "LagKVPress(lag_size=8, cross_scoring=1)",
    "NonCausalAttnPress(chunk_size=16)",
    "CompactorPress(chunk_size=16, blending=0)",
    "ObservedAttentionPress()",
    "SnapKVPress(window_size=8)",
    "StreamingLLMPress(compression_ratio=0.75)",
    "TOVAPress()",
]


def by_kvpress(architecture: str, press: str) -> list[torch.Tensor]:
    """Keys that its own hooks leave, for each layer [K, S, D]."""
    from larder.policy.scorers.kvpress import _build_press, _parse_press

    made = _build_press(_parse_press(press))
    made.compression_ratio = 1 - KEPT / CONTEXT
    attention = "eager" if "Observed" in press else "sdpa"
    _, cache = read_by_kvpress(architecture, made, IDS, attention)
    return [layer.keys[0] for layer in cache.layers]


@with_hooks
@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_press_keeps_the_same_entries_as_in_kvpress(
    architecture, press, reader_for, lane_for
) -> None:
    decoder = wrap_model(tiny(architecture))
    planner = Planner(Protect(0, 0), Kvpress(press), Uniform(), Drop())
    reader, lane = reader_for(decoder, planner, KEPT, CONTEXT), lane_for(decoder, planner)
    Whole().read(reader, [lane], IDS, no_progress)
    for layer, theirs in enumerate(by_kvpress(architecture, press)):
        entries = lane.cache.entries(layer)
        for head, keys in enumerate(theirs):
            nearest = torch.cdist(keys, entries.head_keys(head)).amin(1)
            assert nearest.shape == (KEPT,)
            assert nearest.amax() < 1e-3


@pytest.mark.skipif(not runnable(["kvpress"]), reason="kvpress is not installed")
@pytest.mark.parametrize(
    "rest",
    [
        "pooled() > drop()",
        "pyramid() > fold_ema()",
        "ada() > cam()",
        "uniform() > drop() > compact()",
        "pooled() > park() > flat(tokens=8, page=4, dense=0)",
    ],
)
@pytest.mark.parametrize("press", ["SnapKVPress(window_size=4)", "KeyDiffPress()", "CURPress()"])
def test_presses_compose_with_budgets_merging_and_recall(
    press, rest, watched, reader_for, lane_for
) -> None:
    """Read in blocks, so that heads of different lengths are judged again."""
    sentence = f"protect(sinks=0, recent=2) > kvpress(press='{press}') > {rest}"
    planner = Policy.parse(f"blockwise(tokens=16) > {sentence}").planner
    reader, lane = reader_for(watched, planner, KEPT, CONTEXT), lane_for(watched, planner)
    if "park" in rest:
        parking = OffloadSpec(Flat(tokens=8, page=4, dense=0))
        lane = PrefillSequence(
            SequenceCache(watched.spec, "tiered", planner.ledger, parking=parking), {}
        )
    Blockwise(16).read(reader, [lane], IDS, no_progress)
    assert reader.wrong == []
    assert 0 < lane.cache.managed_entries <= 3 * 2 * KEPT


@dataclass(frozen=True)
class RecordingScorer(Scorer):
    """Scorer that records its observations."""

    asked: frozenset[str] = frozenset()
    is_whole: bool = False
    saw: list[Observation] = field(default_factory=list, compare=False)

    def required_providers(self) -> frozenset[str]:
        return self.asked

    def observes_whole_text(self) -> bool:
        return self.is_whole

    def score(self, observation: Observation) -> Packed:
        self.saw.append(observation)
        return observation.entries.packed_positions().float()


def looked(
    reader_for: Any, lane_for: Any, decoder: Any, scorer: RecordingScorer, lanes: int = 1
) -> list[Observation]:
    planner = Planner(Protect(0, 0), scorer, Uniform(), Drop())
    reader = reader_for(decoder, planner, KEPT, CONTEXT)
    Whole().read(reader, [lane_for(decoder, planner) for _ in range(lanes)], IDS, no_progress)
    return scorer.saw


def entered(module: Any) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Inputs of attention, recorded by hooks of the test."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, named: found.append(named["hidden_states"][0].clone()),
            with_kwargs=True,
        )
        for layer in module.model.layers
    ]
    return found, lambda: [hook.remove() for hook in hooks] and None


@pytest.mark.parametrize("architecture", ["qwen3", "phi3"])
def test_scorer_needing_hidden_states_gets_them(architecture, reader_for, lane_for) -> None:
    decoder = wrap_model(tiny(architecture))
    found, stop = entered(decoder.module)
    saw = looked(reader_for, lane_for, decoder, RecordingScorer(frozenset({"states"})))
    stop()
    assert [observation.inputs["states"].shape for observation in saw] == [(CONTEXT, 64)] * 2
    for observation, states in zip(saw, found, strict=True):
        assert torch.equal(observation.inputs["states"], states)
    assert not any(layer.self_attn._forward_pre_hooks for layer in decoder.module.model.layers)


def test_other_scorers_get_no_hidden_states(watched, reader_for, lane_for) -> None:
    assert not any(
        observation.inputs
        for observation in looked(reader_for, lane_for, watched, RecordingScorer())
    )


def test_sequences_of_a_batch_have_their_own_hidden_states(watched, reader_for, lane_for) -> None:
    planner = Planner(Protect(0, 0), RecordingScorer(frozenset({"states"})), Uniform(), Drop())
    reader = reader_for(watched, planner, KEPT, CONTEXT)
    lanes = [lane_for(watched, planner) for _ in range(2)]
    read_and_evict(reader, lanes, IDS, IDS, 0)
    first, second = planner.scorer.saw[:2]
    torch.testing.assert_close(first.inputs["states"], second.inputs["states"])
    assert len(first.inputs["states"]) == CONTEXT


def test_scorer_needing_the_whole_text_gets_one_observation(
    watched, reader_for, lane_for, monkeypatch
) -> None:
    monkeypatch.setattr(whole_module, "BLOCK_TOKENS", 16)
    [some, *_] = looked(reader_for, lane_for, watched, RecordingScorer())
    [all_of_it, *_] = looked(reader_for, lane_for, watched, RecordingScorer(is_whole=True))
    assert some.queries.shape[1] == 16
    assert all_of_it.queries.shape[1] == CONTEXT
