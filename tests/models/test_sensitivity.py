"""The sensitivity profile: its mask, its cosines, and the file it is kept in."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from larder.core import BadParameter, UnknownName
from larder.models import (
    SensitivityProfile,
    block_mask,
    calibration,
    layer_similarities,
    wrap_model,
)
from larder.models.measurements import sensitivity
from larder.models.measurements import sensitivity as measured
from model_runs import some_ids
from tiny_models import tiny

SMALL = SensitivityProfile(tokens=64, sinks=5, block=16, overlap=0.5)


def visible(token: int, other: int, profile: SensitivityProfile) -> bool:
    """Token i of block b sees the sinks, its own block up to i, and the end of block b - 1."""
    if other > token:
        return False
    own_block = other // profile.block == token // profile.block
    before = other // profile.block == token // profile.block - 1
    in_overlap = other % profile.block >= profile.block - int(profile.block * profile.overlap)
    return other < profile.sinks or own_block or (before and in_overlap)


@pytest.mark.parametrize(
    "profile", [SMALL, SensitivityProfile(64, 0, 10, 0.3), SensitivityProfile(64, 20, 16, 1.0)]
)
def test_block_mask_equals_its_reference(profile) -> None:
    every = torch.arange(64)
    mask = block_mask(profile, every, every)
    expected = [[visible(i, j, profile) for j in range(64)] for i in range(64)]
    assert mask.tolist() == expected
    assert not mask.equal(torch.ones(64, 64).tril().bool())
    assert block_mask(profile, every[20:30], every[:30]).equal(mask[20:30, :30])


def test_chunks_of_any_size_give_the_same(monkeypatch) -> None:
    decoder = wrap_model(tiny("gemma3", layers=4))
    whole = layer_similarities(decoder, some_ids(64), SMALL)
    monkeypatch.setattr(sensitivity, "CHUNK_TOKENS", 7)
    assert layer_similarities(decoder, some_ids(64), SMALL) == pytest.approx(whole, abs=1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the most numbers in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_no_matrix_of_all_tokens_by_all_tokens_is_held(monkeypatch) -> None:
    decoder = wrap_model(tiny("llama"))
    monkeypatch.setattr(sensitivity, "CHUNK_TOKENS", 32)
    with LargestTensor() as watch:
        layer_similarities(decoder, some_ids(512), SensitivityProfile(512, 5, 128, 0.5))
    assert 0 < watch.largest < 512 * 512


def test_first_layer_is_not_sensitive_and_later_ones_are() -> None:
    decoder = wrap_model(tiny("llama", layers=4))
    values = layer_similarities(decoder, some_ids(64), SMALL)
    assert values[0] == pytest.approx(1, abs=1e-6)
    assert all(0 < value < 0.9999 for value in values[1:])


def test_mask_that_hides_nothing_has_similarity_one() -> None:
    decoder = wrap_model(tiny("qwen2", layers=3))
    values = layer_similarities(decoder, some_ids(64), SensitivityProfile(64, 0, 64, 0.0))
    assert values == pytest.approx([1, 1, 1], abs=1e-6)


def test_cosines_equal_a_loop_over_heads_and_tokens() -> None:
    """Keys under the mask come from the model's own masked attention."""
    module, ids = tiny("llama", layers=2), some_ids(64)
    expected = masked_key_cosine(module, ids)
    decoder = wrap_model(module)
    assert layer_similarities(decoder, ids, SMALL)[1] == pytest.approx(expected, abs=1e-5)


def masked_key_cosine(module, ids) -> float:
    """Mean cosine of the second layer's keys with and without the mask, by loops."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    keys: list[torch.Tensor] = []

    def recorded(module, query, key, value, attention_mask, **rest):
        if module.layer_idx == 1:
            keys.append(key[0])
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)

    AttentionInterface.register("recorded", recorded)
    module.set_attn_implementation("recorded")
    rows = [[0.0 if visible(i, j, SMALL) else -1e9 for j in range(64)] for i in range(64)]
    hidden = torch.tensor(rows)[None, None]
    plain = torch.full((64, 64), -1e9).triu(1)[None, None]
    try:
        with torch.no_grad():
            for mask in (plain, hidden):
                module.base_model(
                    input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False
                )
    finally:
        module.set_attn_implementation("sdpa")
        del AttentionInterface._global_mapping["recorded"]
    cosines = [
        float(keys[0][h, t] @ keys[1][h, t] / keys[0][h, t].norm() / keys[1][h, t].norm())
        for h in range(keys[0].shape[0])
        for t in range(64)
    ]
    return sum(cosines) / len(cosines)


def test_sliding_layers_are_not_profiled() -> None:
    decoder = wrap_model(tiny("gemma3", layers=4))
    assert len(layer_similarities(decoder, some_ids(64), SMALL)) == 2


def test_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(BadParameter, match="needs 64 tokens, got 60"):
        layer_similarities(wrap_model(tiny("llama")), some_ids(60), SMALL)


@pytest.mark.parametrize(
    "wrong", [{"tokens": 1}, {"block": 0}, {"sinks": -1}, {"overlap": 1.5}], ids=str
)
def test_profiles_out_of_range_are_refused(wrong) -> None:
    with pytest.raises(BadParameter, match="overlap in"):
        SensitivityProfile(**wrong)


@pytest.fixture
def counted(monkeypatch):
    """Measurements are counted, and made up."""
    calls: list[int] = []

    def measure(decoder, ids, profile, progress):
        calls.append(len(ids))
        return tuple(0.5 + index / 10 for index in range(len(decoder.spec.managed)))

    monkeypatch.setattr(measured, "layer_similarities", measure)
    return calls


def encode(text: str) -> list[int]:
    return [3 + ord(letter) % 100 for letter in text]


def test_measurement_is_cached(counted, larder_home) -> None:
    decoder, names = wrap_model(tiny("llama")), frozenset({"sensitivity"})
    first = calibration.calibrate(decoder, encode, names)
    path = larder_home / decoder.spec.fingerprint / "sensitivity.json"
    assert json.loads(path.read_text())["values"] == [0.5, 0.6]
    assert calibration.calibrate(decoder, encode, names) == first == {"sensitivity": (0.5, 0.6)}
    assert len(counted) == 1
    other = wrap_model(tiny("llama", seed=1))
    calibration.calibrate(other, encode, names)
    assert len(counted) == 2
    assert not list(larder_home.rglob("*.draft"))


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"schema": 0}', '{"schema": 1, "profile": {}}', '"\\ud800"', "null"]
)
def test_damaged_file_is_measured_again(counted, larder_home, damage) -> None:
    decoder, names = wrap_model(tiny("llama")), frozenset({"sensitivity"})
    calibration.calibrate(decoder, encode, names)
    path = larder_home / decoder.spec.fingerprint / "sensitivity.json"
    path.write_text(damage)
    calibration.calibrate(decoder, encode, names)
    assert len(counted) == 2
    assert json.loads(path.read_text())["values"] == [0.5, 0.6]


@pytest.mark.parametrize("values", [[0.5], [0.5, "x"], [0.5, float("nan")], 7])
def test_values_of_another_shape_are_measured_again(counted, larder_home, values) -> None:
    decoder, names = wrap_model(tiny("llama")), frozenset({"sensitivity"})
    calibration.calibrate(decoder, encode, names)
    path = larder_home / decoder.spec.fingerprint / "sensitivity.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"values": values}))
    assert calibration.calibrate(decoder, encode, names) == {"sensitivity": (0.5, 0.6)}


def test_unwritable_home_is_tolerated(counted, tmp_path, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LARDER_HOME", str(blocked))
    names = frozenset({"sensitivity"})
    assert calibration.calibrate(wrap_model(tiny("llama")), encode, names)


def test_bundled_text_measurement_is_plausible() -> None:
    decoder = wrap_model(tiny("llama"))
    values = calibration.calibrate(decoder, encode, frozenset({"sensitivity"}))["sensitivity"]
    assert values[0] == pytest.approx(1, abs=1e-6)
    assert 0 < values[1] < 1


def test_unknown_measurements_are_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'sensitivity'"):
        calibration.calibrate(wrap_model(tiny("llama")), encode, frozenset({"sensitivty"}))
