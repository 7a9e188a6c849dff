"""Bits of transform-coded entries that a model's calibration chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from architectures import families_hybrid, families_latent
from larder.core import BadParameter, ModelError
from larder.models import (
    MEASUREMENTS,
    REQUEST,
    BitsMeasurement,
    CausalAttention,
    best_bits,
    calibrate,
    copy_maxima,
    known_numbers,
    with_companions,
    wrap_model,
)
from larder.models.measurements import transform_bits
from larder.policy import USUAL_BITS, Exact, Transform
from larder.session import Policy
from measurements import SAMPLE, encode
from model_attention import heads_of
from tiny_models import tiny

FEW = BitsMeasurement(context=256, following=12, cue=4, passages=2)


@pytest.fixture
def calibrated(three_layers, larder_home, monkeypatch):
    """A model with transforms of a short text."""
    short = replace(MEASUREMENTS.load("transform")(), tokens=96, piece=48, cost_tokens=0)
    few, load = {"transform": short, "transform_bits": FEW}, type(MEASUREMENTS).load

    def load_few(family: Any, name: str) -> Any:
        is_few = family is MEASUREMENTS and name in few
        return (lambda: few[name]) if is_few else load(family, name)

    monkeypatch.setattr(type(MEASUREMENTS), "load", load_few)
    calibrate(three_layers, encode, frozenset({"transform"}))
    return three_layers


@pytest.mark.parametrize(
    ("lost", "bits"),
    [
        ({1.5: (0.1, 0.4), 2.0: (0.2, 0.4), 2.5: (0.4, 0.8)}, 1.5),
        ({1.5: (0.8, 0.01), 2.5: (0.1, 0.2)}, 1.5),  # .63 of it on geometric average
        ({2.0: (0.09, 0.2), 2.5: (0.1, 0.2), 3.0: (0.2, 0.4)}, 2.5),  # 1.05 times as much
        ({1.0: (0.1, 0.1), 1.25: (0.1, 0.11), 1.5: (0.12, 0.12), 2.5: (0.4, 0.4)}, 1.25),
        ({1.5: (0.0, 0.0), 2.0: (0.0, 0.0), 2.5: (0.0, 0.0)}, 2.5),
        ({2.5: (0.5, 0.5), 3.0: (0.05, 0.05)}, 3.0),
        ({2.0: (0.1, 0.1), 2.5: (0.5, 0.5), 3.0: (0.1, 0.1)}, 3.0),
    ],
)
def test_best_bits_are_nearest_the_usual_ones_of_those_that_lose_least(
    lost: dict[float, Any], bits: float
) -> None:
    assert best_bits(lost, 1.1) == bits


def test_weights_of_a_copy_equal_loops(three_layers) -> None:
    text = SAMPLE.ids(14)
    ids, found = (*text, *encode(REQUEST), *text), list[torch.Tensor]()
    three_layers.forward_uncached(
        ids, CausalAttention(lambda inputs: found.append(copy_maxima(inputs, len(text))))
    )
    for heads, own in zip(heads_of(three_layers, ids), found, strict=True):
        best = torch.zeros(2, len(text))
        for head in range(4):
            for token in range(len(ids) - len(text), len(ids)):
                row = torch.tensor(heads.row(head, token)[: len(text)])
                best[head // 2] = torch.maximum(best[head // 2], row / row.sum())
        assert torch.allclose(own, best, atol=1e-5)


def test_entries_are_those_of_the_policy_larder(calibrated) -> None:
    """The same scores give the same entries through the planner of a session."""
    passage = FEW._passage(calibrated, SAMPLE.ids(268), tuple(encode(REQUEST)))
    cache = transform_bits._coded(calibrated, passage, Transform(bits=2.0), 1 / 8)
    policy = Policy.parse("larder > transform(bits=2)").with_sizes(256 // 16, None)
    storage, spec = policy.storage, calibrated.spec
    entries = storage.entries(256 // 16, spec.managed, spec.dtype.itemsize)
    planner = policy.planner
    quotas = planner.quotas(entries, 256, tuple(passage.scores), {})
    full = transform_bits._copied(passage.cache, storage)
    ready = {
        index: transform_bits._scored(planner, full, index, scores, entries)
        for index, scores in passage.scores.items()
    }
    for index, plan in full.fit_plans(planner.plan(ready, quotas, full.entries)).items():
        full.apply(index, plan)
    assert cache.lengths() == full.lengths() and cache.nbytes == full.nbytes
    for layer in range(3):
        own, other = cache.entries(layer), full.entries(layer)
        assert torch.equal(own.packed_positions(), other.packed_positions())


def test_fewer_bits_hold_more_entries_in_the_same_bytes(calibrated) -> None:
    passage = FEW._passage(calibrated, SAMPLE.ids(268), tuple(encode(REQUEST)))
    caches = [
        transform_bits._coded(calibrated, passage, Transform(bits=bits), 1 / 8)
        for bits in (1.5, 2.5, 4.0)
    ]
    counts = [cache.managed_entries for cache in caches]
    assert counts[0] > counts[1] > counts[2]
    sizes = [cache.nbytes for cache in caches]
    assert max(sizes) < 1.1 * min(sizes)
    assert min(sizes) > 0


def test_divergences_are_those_of_all_passages(calibrated, monkeypatch) -> None:
    given = iter(range(100))
    monkeypatch.setattr(transform_bits, "_lost", lambda *_: [float(next(given)), 1.0])
    found = FEW.divergences(calibrated, SAMPLE)
    count = len(FEW.candidates)
    assert list(found) == list(FEW.candidates) and USUAL_BITS in found
    assert list(found.values()) == [(n, 1.0, n + count, 1.0) for n in range(count)]


def test_numbers_are_one_candidate_for_all_layers(calibrated, monkeypatch) -> None:
    monkeypatch.setattr(BitsMeasurement, "candidates", (1.5, 2.5))
    numbers = calibrate(calibrated, encode, frozenset({"transform_bits"}))["transform_bits"]
    assert len(numbers) == 3 and len(set(numbers)) == 1 and numbers[0] in FEW.candidates
    assert known_numbers(calibrated.spec.fingerprint, "transform_bits") == numbers


def test_models_that_transforms_do_not_fit_are_refused(calibrated, monkeypatch) -> None:
    """So that `larder model calibrate` goes on with other measurements."""
    monkeypatch.setattr(transform_bits, "SHARES", (1 / 200,))
    with pytest.raises(ModelError, match=r"cannot hold this model's entries: The budget of"):
        calibrate(calibrated, encode, frozenset({"transform_bits"}))


def model_with(layers: str) -> Any:
    if layers == "windows":
        return tiny("gemma3")
    name, families = {
        "shared entries": ("Gemma 3n", families_latent.FAMILIES),
        "recurrent states": ("LFM2", families_hybrid.FAMILIES),
    }[layers]
    (family,) = (family for family in families if family.name == name)
    return family.model()


@pytest.mark.parametrize("layers", ["windows", "shared entries", "recurrent states"])
def test_copies_of_a_cache_say_what_it_says(larder_home, layers: str) -> None:
    """As long as nothing is coded."""
    with wrap_model(model_with(layers)) as decoder:
        passage = FEW._passage(decoder, SAMPLE.ids(268), tuple(encode(REQUEST)))
        copied = transform_bits._copied(passage.cache, Exact())
        for probe in passage.probes:
            logits = transform_bits._logits(decoder, copied, probe.ids, probe.first)
            assert torch.allclose(logits, probe.logits, atol=1e-4)


def test_a_full_cache_at_many_bits_loses_nothing(calibrated, monkeypatch) -> None:
    monkeypatch.setattr(transform_bits, "SHARES", (2.0,))
    passage = FEW._passage(calibrated, SAMPLE.ids(268), tuple(encode(REQUEST)))
    near = transform_bits._lost(calibrated, passage, Transform(bits=12.0))
    monkeypatch.setattr(transform_bits, "SHARES", (1 / 16,))
    far = transform_bits._lost(calibrated, passage, Transform(bits=1.0))
    assert max(near) < 1e-5 < min(far)


def test_command_measures_bits_beside_transforms() -> None:
    assert with_companions(["transform"]) == ("transform", "transform_bits")
    assert with_companions(["transform_bits", "transform"]) == ("transform_bits", "transform")
    assert with_companions(["transform_full_metric"]) == ("transform_full_metric",)


@pytest.mark.parametrize(
    "changed", [{"context": 30}, {"passages": 0}, {"tolerance": 0.9}, {"cue": 0}, {"following": 0}]
)
def test_wrong_sizes_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match="transform_bits needs context"):
        replace(FEW, **changed)
