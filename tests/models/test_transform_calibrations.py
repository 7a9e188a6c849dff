"""Calibrations of a transform: the metrics and the keys that they are told to take."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from builders import a_layer
from larder.cache import (
    TransformTables,
    check_measured,
    file_digest,
    state_of,
    table_file,
    tables_path,
)
from larder.core import BadParameter, CacheError, MeanSource, RopeStage, TransformSpec
from larder.models import klt
from larder.ops import rotate
from larder.policy import Transform
from transforms import some_tables

SIZE = 6


def some_moments(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    parts = torch.randn(2, 40, SIZE, generator=source, dtype=torch.float64)
    mixed = parts @ torch.randn(2, SIZE, SIZE, generator=source, dtype=torch.float64)
    covariance, metric = mixed.transpose(1, 2) @ mixed / 40
    return covariance, metric


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_component_distances_equal_a_power_of_the_metric(power: float) -> None:
    covariance, metric = some_moments()
    forward, deviation = klt(covariance, metric, power)
    scaled = metric / metric.diagonal().mean()
    values, vectors = torch.linalg.eigh(scaled)
    wanted = (vectors * values**power) @ vectors.T
    assert torch.allclose(forward @ forward.T, wanted, atol=1e-8)
    spread = forward.T @ covariance @ forward
    assert torch.allclose(spread, torch.diag(deviation**2), atol=1e-8)


def test_every_setting_has_its_calibration() -> None:
    assert Transform().required_calibrations() == {"transform"}
    assert Transform(metric=0.0).required_calibrations() == {"transform_unweighted"}
    assert Transform(metric=1.0).required_calibrations() == {"transform_full_metric"}
    after = Transform(rope=RopeStage.AFTER)
    assert after.required_calibrations() == {"transform_after_rope"}
    with pytest.raises(BadParameter, match=r"metric must be 0, 0.5 or 1"):
        Transform(metric=1.0, rope=RopeStage.AFTER)


def test_saved_caches_do_not_depend_on_bits() -> None:
    """So one that was coded before a model's own number was measured opens behind it."""
    assert Transform(bits=1.25).transform == Transform().transform
    assert Transform(bits=1.25).parked != Transform().parked


def test_spec_round_trips_and_reads_old_spellings() -> None:
    for spec in (
        TransformSpec(),
        TransformSpec(metric=0.0),
        TransformSpec(rope=RopeStage.AFTER),
        TransformSpec(mean=MeanSource.MODEL),
    ):
        assert TransformSpec.from_text(spec.to_text()) == spec
    old = '{"coder": "entropy", "sinks": 4, "recent": 8, "block": 256, "model": "m"}'
    assert TransformSpec.from_text(old) == TransformSpec(
        sinks=4, recent=8, model="m", mean=MeanSource.MODEL
    )


@pytest.mark.parametrize("damage", ["no such layer", "not finite", "cut off", "a bit flips"])
def test_damaged_file_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("LARDER_HOME", str(tmp_path))
    layer, path = a_layer(), tables_path("m", "transform")
    path.parent.mkdir(parents=True)
    tables = some_tables(layer)
    if damage == "not finite":
        tables.forward[0, 0, 0, 0] = float("nan")
    state = state_of({layer.index + (damage == "no such layer"): tables})
    save_file(state, path, {table_file.DIGEST: file_digest(state)})
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:-4])
    if damage == "a bit flips":
        flip_last_bit(path)
    with pytest.raises(
        CacheError, match=r"measure them with `larder model calibrate MODEL transform --again`"
    ):
        TransformTables.load(layer, TransformSpec(model="m"))


def flip_last_bit(path: Path) -> None:
    written = path.read_bytes()
    path.write_bytes(written[:-4] + bytes([written[-4] ^ 1]) + written[-3:])  # of a number


def test_file_without_a_digest_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of earlier versions have none, so that a flipped bit of theirs is not noticed."""
    monkeypatch.setenv("LARDER_HOME", str(tmp_path))
    layer, path = a_layer(), tables_path("m", "transform")
    path.parent.mkdir(parents=True)
    state = state_of({layer.index: some_tables(layer)})
    save_file(state, path)
    old = TransformTables.load(layer, TransformSpec(model="m"))
    save_file(state, path, {table_file.DIGEST: file_digest(state)})
    os.utime(path, ns=(1, 1))
    assert TransformTables.load(layer, TransformSpec(model="m")).digest == old.digest
    check_measured(path)
    flip_last_bit(path)
    with pytest.raises(KeyError, match="other numbers than were written"):
        check_measured(path)


def test_digest_names_tensors_types_and_shapes() -> None:
    tensor = torch.arange(6.0)
    others = [{"b": tensor}, {"a": tensor.view(2, 3)}, {"a": tensor.view(torch.int32)}]
    digests = [file_digest(each) for each in ({"a": tensor}, *others, {"a": tensor + 1})]
    assert len(set(digests)) == len(digests)
    assert file_digest({"a": tensor, "b": tensor}) == file_digest({"b": tensor, "a": tensor})


def test_rotated_keys_are_transformed_without_unrotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARDER_HOME", str(tmp_path))
    layer = a_layer()
    spec = TransformSpec(model="m", rope=RopeStage.AFTER)
    with pytest.raises(CacheError, match="calibrate MODEL transform_after_rope"):
        TransformTables.load(layer, spec)
    for name in ("transform", "transform_after_rope"):
        path = tables_path("m", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state_of({layer.index: some_tables(layer)}), path)
    after, before = (
        TransformTables.load(layer, one) for one in (spec, replace(spec, rope=RopeStage.BEFORE))
    )
    keys, values = torch.randn(2, 3, layer.head_dim)
    positions = torch.tensor([0, 5, 9])
    radians = torch.tensor(layer.radians)
    turned_back = rotate(keys[None], -positions, radians)[0]
    own = after.components(0, turned_back, values, positions)
    assert torch.allclose(own, before.components(0, keys, values, positions), atol=1e-4)
    assert torch.allclose(after.keys(0, own.chunk(2, 1)[0], positions), turned_back, atol=1e-4)


def test_inverse_of_wide_heads_on_two_threads() -> None:
    tables = some_tables(replace(a_layer(1, 1), head_dim=200))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        products = tables.forward @ tables.inverse
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(products, torch.eye(200).expand_as(products), atol=1e-4)
