"""Training of LESS: what layers write beside a state of what was evicted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from larder.cache import LowRankMaps
from larder.core import BadParameter
from larder.models import LayerTensors, LoadedModel
from larder.training import (
    PASSAGE_METHODS,
    SHARES,
    EvictedSample,
    EvictionSample,
    EvictionSamples,
    LessTraining,
    Passage,
    PassageLimits,
    compared_errors,
    first_maps,
    maps_of,
    matched_scale,
    sample_evictions,
)
from references.cache.loop import Entry
from references.cache.low_rank import LowRankLoop


@pytest.fixture(scope="module")
def passages(passages_within: Callable[[PassageLimits], list[Passage]]) -> list[Passage]:
    return passages_within(PassageLimits(600, 400, 300))


@pytest.fixture(scope="module")
def layers(loaded: LoadedModel, passages: list[Passage]) -> list[EvictionSamples]:
    return sample_evictions(loaded.decoder, passages, lambda done, total: None)


@pytest.fixture
def sample(layers: list[EvictionSamples]) -> EvictionSample:
    return layers[0].samples[0]


def some_maps(sample: EvictionSample, seed: int = 0) -> LowRankMaps:
    source = torch.Generator().manual_seed(seed)
    return LowRankMaps(**first_maps(sample.layer, 4, source))


def test_sample_target_is_full_attention(sample: EvictionSample) -> None:
    everything = sample.kept_mask(sample.context)
    assert bool(everything.all())
    out, _ = sample.attended(*sample.selected(everything))
    torch.testing.assert_close(out, sample.target)
    few, _ = sample.attended(*sample.selected(sample.kept_mask(4)))
    assert not torch.allclose(few, sample.target, atol=1e-3)


def test_sample_keeps_latest_and_most_attended_entries(sample: EvictionSample) -> None:
    mass = torch.arange(12.0).flip(0).expand(sample.layer.kv_heads, -1)
    few = {"keys": sample.keys[:, :12], "values": sample.values[:, :12]}
    kept = replace(sample, mass=mass, **few).kept_mask(6)
    wanted = [0, 1, 2, 9, 10, 11]
    assert all(row.nonzero().flatten().tolist() == wanted for row in kept)


@pytest.mark.extended
def test_output_with_a_state_equals_the_cache_reference(sample: EvictionSample) -> None:
    maps, case = some_maps(sample), EvictedSample.of(sample, 0.25)
    loop, kept = LowRankLoop(sample.layer, maps), sample.kept_mask(round(0.25 * sample.context))
    first = sample.target.shape[1] - 1
    for head in range(sample.layer.kv_heads):
        pairs = zip(sample.keys[head], sample.values[head], strict=True)
        entries = [Entry(n, key, value) for n, (key, value) in enumerate(pairs)]
        loop.gone[head] = [e for e in entries if not kept[head, e.position]]
        loop.heads[head] = [e for e in entries if kept[head, e.position]]
    alone = EvictedSample.output(replace(case, kept=sample_without_new_tokens(sample, kept)), maps)
    for head in (0, sample.layer.query_heads - 1):
        own = loop.heads[head // sample.layer.group]
        expected = loop.attend_one(head, sample.queries[head, first], own)
        torch.testing.assert_close(alone[head, first].double(), expected, atol=1e-4, rtol=1e-4)


def sample_without_new_tokens(
    sample: EvictionSample, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    nothing = torch.zeros_like(sample.target), torch.full(sample.target.shape[:2], -torch.inf)
    return replace(sample, among=nothing).attended(*sample.selected(kept))


def test_initial_scale_matches_the_evicted_attention(
    layers: list[EvictionSamples],
) -> None:
    own = layers[1]
    layer = own.samples[0].layer
    cases = [EvictedSample.of(sample, 0.25) for sample in own.samples]
    tensors = first_maps(layer, 4, torch.Generator().manual_seed(0))
    tensors["key_scale"] = matched_scale(cases, tensors, layer)
    gaps = [case.evicted_lse() - case.state_attention(LowRankMaps(**tensors))[1] for case in cases]
    assert float(torch.stack(gaps).mean()) == pytest.approx(0, abs=1e-3)
    logs = {**tensors, "key_scale": tensors["key_scale"].log()}
    torch.testing.assert_close(maps_of(logs).key_scale, tensors["key_scale"])


def test_error_is_after_the_output_projection() -> None:
    projection = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])  # one head
    own = EvictionSamples([], projection)
    out, target = torch.tensor([[[1.0, 1.0]]]), torch.zeros(1, 1, 2)
    assert float(own.error(out, target)) == pytest.approx((1 + 4) / 2)


@pytest.mark.slow
def test_training_beats_eviction_with_as_many_bytes_and_shuffled_weights_do_not(
    loaded: LoadedModel, passages: list[Passage], layers: list[EvictionSamples]
) -> None:
    method, done = LessTraining(inner=16, epochs=25, rate=4e-3), list[int]()
    trained = method.fit(loaded.decoder, passages, 0, lambda step, total: done.append(step))
    assert len(trained) == len(layers) == len(loaded.decoder.spec.managed)
    assert done == [*range(1, len(passages) + len(layers) + 1)]
    metrics = method.test(loaded.decoder, trained, passages)
    assert set(metrics) == {"layers_better_4", "error_ratio_4", "layers_better_8", "error_ratio_8"}
    assert metrics["error_ratio_4"] < 1
    ratios = [
        compared_errors(own, tensors, 0.25) for own, tensors in zip(layers, trained, strict=True)
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert metrics["error_ratio_4"] == pytest.approx(mean)
    assert metrics["layers_better_4"] == sum(ratio < 1 for ratio in ratios)
    worse = [
        compared_errors(own, shuffled(tensors), 0.25)
        for own, tensors in zip(layers, trained, strict=True)
    ]
    assert sum(worse) > sum(ratios)
    for layer, tensors in zip(loaded.decoder.spec.managed, trained, strict=True):
        wanted = method.shapes(layer, 0, tensors)
        assert {name: tuple(own.shape) for name, own in tensors.items()} == wanted


def shuffled(tensors: LayerTensors) -> dict[str, torch.Tensor]:
    hidden = tensors["query_hidden"]
    order = torch.randperm(hidden.shape[1], generator=torch.Generator().manual_seed(0))
    return {**tensors, "query_hidden": hidden[:, order]}


def test_settings_are_checked() -> None:
    assert PASSAGE_METHODS.load("less") is LessTraining
    assert SHARES == (0.25, 0.125)
    with pytest.raises(BadParameter, match="above 0"):
        LessTraining(epochs=0)
