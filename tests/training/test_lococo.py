"""Training of LoCoCo: slots of samples, and what gamma of 0 leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from builders import a_layer, a_spec
from larder.core import BadParameter, ModelError
from larder.models import LoadedModel
from larder.session import TokenizerAdapter
from larder.training import (
    PASSAGE_METHODS,
    CorpusSplit,
    EvictionSamples,
    LococoTraining,
    Passage,
    PassageLimits,
    SlotSample,
    dropped_ratio,
    read_corpus,
    sample_evictions,
    train_on_passages,
)

SMALL = LococoTraining(slots=8, taps=3, epochs=4, rate=2e-2)


@pytest.fixture(scope="module")
def passages(passages_within: Callable[[PassageLimits], list[Passage]]) -> list[Passage]:
    return passages_within(PassageLimits(300, 1, 300))[:2]


@pytest.fixture(scope="module")
def layers(loaded: LoadedModel, passages: list[Passage]) -> list[EvictionSamples]:
    return sample_evictions(loaded.decoder, passages, lambda done, total: None)


def tensors(sample: SlotSample, gamma: float) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    width = 2 * sample.sample.layer.head_dim
    kernel = torch.randn(64, width, 3, generator=source) / 8
    return {"kernel": kernel, "bias": torch.zeros(64), "gamma": torch.tensor(gamma)}


def test_slots_are_the_kept_entries_with_least_attention(layers: list[EvictionSamples]) -> None:
    sample = layers[0].samples[0]
    few = {"keys": sample.keys[:, :12], "values": sample.values[:, :12]}
    mass = torch.arange(12.0).expand(len(sample.keys), -1)
    own = SlotSample.of(replace(sample, mass=mass, **few), 0.5, 64)
    # Kept are 9 to 11, the latest, and 6 to 8, of which half of 6 may be slots.
    assert own.chosen.tolist() == [[6, 7, 8]] * len(mass)
    torch.testing.assert_close(own.heavy[0], sample.keys[:, 9:12])
    torch.testing.assert_close(own.others[1], sample.values[:, :9])


def test_zero_gamma_equals_dropping(layers: list[EvictionSamples]) -> None:
    own = SlotSample.of(layers[0].samples[0], 0.25, 64)
    torch.testing.assert_close(own.output(tensors(own, 0.0)), own.bare)
    assert not torch.allclose(own.output(tensors(own, 0.5)), own.bare, atol=1e-3)
    assert dropped_ratio(layers[0], tensors(own, 0.0), 0.25) == pytest.approx(1, abs=1e-4)


@pytest.mark.extended
def test_training_beats_dropping_and_its_initialization(
    loaded: LoadedModel, passages: list[Passage]
) -> None:
    done = list[int]()
    trained = SMALL.fit(loaded.decoder, passages, 0, lambda step, total: done.append(step))
    assert len(trained) == len(loaded.decoder.spec.managed) and done[-1] == len(done)
    metrics = SMALL.test(loaded.decoder, trained, passages)
    assert set(metrics) == {"layers_better_4", "error_ratio_4", "layers_better_8", "error_ratio_8"}
    first = replace(SMALL, rate=1e-12).fit(loaded.decoder, passages, 0, lambda step, total: None)
    untrained = SMALL.test(loaded.decoder, first, passages)
    for name in ("error_ratio_4", "error_ratio_8"):
        assert metrics[name] < min(1, untrained[name] - 0.02)
    assert all(0 <= float(own["gamma"]) <= 1 for own in trained)
    for layer, own in zip(loaded.decoder.spec.managed, trained, strict=True):
        wanted = SMALL.shapes(layer, 0, own)
        assert {name: tuple(each.shape) for name, each in own.items()} == wanted


def test_settings_are_checked() -> None:
    assert PASSAGE_METHODS.load("lococo") is LococoTraining
    with pytest.raises(BadParameter, match="above 0"):
        LococoTraining(taps=0)


@pytest.mark.parametrize("name", ["less", "lococo"])
def test_passages_too_short_to_sample_are_refused(loaded: LoadedModel, name: str) -> None:
    adapter, method = TokenizerAdapter(loaded.tokenizer), PASSAGE_METHODS.load(name)()
    limits = PassageLimits(300, 300, 100)
    with pytest.raises(ModelError, match="passages of 257 tokens or more.*more passage_tokens"):
        train_on_passages(
            method, loaded.decoder, adapter, read_corpus(None), limits, lambda done, total: None
        )


def test_split_of_short_passages_is_not_tested(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, corpus = TokenizerAdapter(loaded.tokenizer), read_corpus(None)
    plain = corpus.passages(adapter, 300, 0)
    mixed = [
        own if own.split is CorpusSplit.TRAIN else replace(own, ids=own.ids[:99]) for own in plain
    ]
    monkeypatch.setattr(type(corpus), "passages", lambda *args: iter(mixed))
    chosen = SMALL.passages(corpus, adapter, PassageLimits(600, 300, 300))
    assert chosen[CorpusSplit.TRAIN]
    assert not chosen[CorpusSplit.TEST] and not chosen[CorpusSplit.HELD_OUT]


@pytest.mark.parametrize("name", ["less", "lococo"])
@pytest.mark.parametrize("change", [{"latent_rank": 4}, {"sinks": (0.5, 0.5)}])
def test_layers_with_latents_or_sinks_are_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, object]
) -> None:
    monkeypatch.setattr(loaded.decoder, "spec", a_spec(replace(a_layer(2, 1), **change)))
    method = PASSAGE_METHODS.load(name)()
    with pytest.raises(ModelError, match=f"{name} cannot be trained"):
        method.fit(loaded.decoder, [], 0, lambda done, total: None)
