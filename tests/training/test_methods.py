"""Trained methods: closed forms, what training learns, cards, and published weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from builders import HIDDEN, a_layer
from larder.core import BadParameter, LayerSpec, ModelError, ModelSpec
from larder.models import LearnedWeights, read_learned
from larder.training import (
    LOGIT,
    METHODS,
    PLUS,
    STATES,
    WEIGHT,
    CorpusSplit,
    LabelFile,
    LayerData,
    Method,
    Shard,
    adopt_published,
    agreement,
    explained,
    rank_correlation,
    ridge,
    top_overlap,
    train,
)
from learned_gates import every_gate, random_tensors, random_weights

LAYER = a_layer(2, 2)
SPEC = ModelSpec((LAYER,), torch.float32, torch.device("cpu"), "f" * 32, HIDDEN)
SETTINGS = {
    "kvzap": {},
    "kvzap_mlp": {"share": 0.5, "epochs": 12, "batch": 64},
    "fast_kvzip": {"channels": 4, "sinks": 2, "epochs": 20, "rate": 0.03, "batch": 128},
    "locret": {"inner": 8, "epochs": 12, "window": 32},
}


def a_label_file(folder: Path, tokens: int = 300) -> LabelFile:
    """Labels that follow from the states, with a little noise."""
    source = torch.Generator().manual_seed(5)
    weight = torch.randn(HIDDEN, 2, generator=source) / HIDDEN**0.5
    shards = []
    for number, split in enumerate(
        (CorpusSplit.TRAIN, CorpusSplit.TRAIN, CorpusSplit.TEST, CorpusSplit.HELD_OUT)
    ):
        states = torch.randn(tokens, HIDDEN, generator=source)
        logits = 1.5 * (states @ weight) + 0.1 * torch.randn(tokens, 2, generator=source) - 1
        named = {STATES: states.half(), WEIGHT: logits.sigmoid().T, LOGIT: logits.T}
        named[PLUS] = logits.exp().T
        path = folder / f"{number}.safetensors"
        save_file({f"{name}.0": tensor.contiguous() for name, tensor in named.items()}, path)
        shards.append(Shard(path, f"text {number}", "texts", split, tokens))
    return LabelFile("digest", tuple(shards))


def trained(name: str, labels: LabelFile, seed: int = 0) -> LearnedWeights:
    method = METHODS.load(name)(**SETTINGS[name])
    return train(method, labels, SPEC, seed, lambda done, total: None)


def test_ridge_equals_the_closed_form() -> None:
    source = np.random.default_rng(0)
    inputs, targets = source.normal(size=(50, 6)), source.normal(size=(50, 2)) + 3
    wide = np.hstack([inputs, np.ones((50, 1))])
    penalty = np.diag([2.5] * 6 + [0.0])  # the constant is free
    expected = np.linalg.solve(wide.T @ wide + penalty, wide.T @ targets)
    weight, bias = ridge(torch.tensor(inputs), torch.tensor(targets), 2.5)
    np.testing.assert_allclose(weight.numpy(), expected[:6].T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias.numpy(), expected[6], rtol=1e-5, atol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("name", METHODS.names())
def test_method_learns_a_learnable_target(name, tmp_path) -> None:
    labels = a_label_file(tmp_path)
    found = trained(name, labels)
    assert found.card.metrics["held_out_spearman"] > 0.9
    assert found.card.metrics["test_documents"] == 1 and found.card.tokens == 600
    assert found.card.method == name and found.card.data == "digest"
    again = trained(name, labels)
    for key, tensor in found.layers[0].items():
        assert torch.equal(again.layers[0][key], tensor)
    gate = every_gate()[name]
    shapes = dict(gate.shapes(LAYER, HIDDEN, found.layers[0]))
    assert {key: tuple(each.shape) for key, each in found.layers[0].items()} == shapes
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(0))
    shuffled = {
        key: each[..., order] if each.shape[-1] == HIDDEN else each
        for key, each in found.layers[0].items()
    }
    states = torch.randn(400, HIDDEN, generator=torch.Generator().manual_seed(1))
    own = rank_correlation(gate.gate(states, found.layers[0]), gate.gate(states, shuffled))
    assert float(own.abs().max()) < 0.7


def test_weights_are_saved_with_their_card(tmp_path) -> None:
    found = trained("kvzap", a_label_file(tmp_path))
    found.save(tmp_path / "home" / "kvzap.safetensors")
    read = read_learned(tmp_path / "home" / "kvzap.safetensors")
    assert read.card == found.card
    assert all(torch.equal(read.layers[0][key], each) for key, each in found.layers[0].items())
    assert json.loads(found.card.dumps())["settings"] == {"alpha": METHODS.load("kvzap")().alpha}


def test_missing_training_documents_are_refused(tmp_path) -> None:
    labels = a_label_file(tmp_path)
    with pytest.raises(ModelError, match="no training document"):
        trained("kvzap", LabelFile("", labels.shards[2:]))


def test_training_that_diverges_is_refused(tmp_path) -> None:
    class Diverging(METHODS.load("kvzap")):
        def fit(self, data: LayerData, layer: LayerSpec, seed: int) -> dict[str, torch.Tensor]:
            return {**super().fit(data, layer, seed), "bias": torch.full((2,), torch.nan)}

        def gate(self):
            return every_gate()["kvzap"]

    method: Method = Diverging()
    with pytest.raises(ModelError, match="diverged in layer 0"):
        train(method, a_label_file(tmp_path), SPEC, 0, lambda done, total: None)


def test_agreement_hand_values() -> None:
    targets = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    predicted = torch.tensor([[1.0], [0.0], [2.0], [3.0]])
    assert explained(predicted, targets).tolist() == pytest.approx([1 - 2 / 5])
    assert rank_correlation(predicted, targets).tolist() == pytest.approx([0.8])
    assert top_overlap(predicted, targets, 4).tolist() == [1.0]
    assert top_overlap(-predicted, targets, 2).tolist() == [0.0]
    assert agreement(targets, targets) == {
        "r2": 1.0,
        "spearman": pytest.approx(1.0),
        "top_quarter": 1.0,
        "top_tenth": 1.0,
    }


@pytest.mark.parametrize("prefix", ["layers", "module_list"])
def test_published_weights_are_adopted_if_they_fit(tmp_path, prefix) -> None:
    gate, path = every_gate()["kvzap_mlp"], tmp_path / "model.safetensors"
    given = random_tensors(gate, LAYER, HIDDEN)
    save_file({f"{prefix}.0.{key}": each for key, each in given.items()}, path)
    adopted = adopt_published(path, "kvzap_mlp", SPEC)
    assert adopted.card.fingerprints == (SPEC.fingerprint,)
    assert adopted.card.data.startswith("sha256:")
    assert all(torch.equal(adopted.layers[0][key], each) for key, each in given.items())
    with pytest.raises(ModelError, match="kvzap for layer 0 have shapes"):
        adopt_published(path, "kvzap", SPEC)


def test_card_of_an_adopted_file_is_kept(tmp_path) -> None:
    weights = random_weights("kvzap", every_gate()["kvzap"], SPEC)
    path = tmp_path / "gates.safetensors"
    weights.save(path)
    assert adopt_published(path, "kvzap", SPEC).card == weights.card
    other = replace(weights, card=replace(weights.card, fingerprints=("0" * 32,)))
    other.save(path)
    with pytest.raises(ModelError, match="was trained for the model 0000"):
        adopt_published(path, "kvzap", SPEC)
    tensors = {"layers.0.weight": torch.zeros(1)}
    save_file(tensors, path, {"card": "not JSON"})
    with pytest.raises(ModelError, match="holds no weights by layer"):
        adopt_published(path, "kvzap", SPEC)


def test_pickle_files_are_refused(tmp_path) -> None:
    weights = random_weights("kvzap", every_gate()["kvzap"], SPEC)
    path = tmp_path / "gates.pt"
    torch.save(weights.layers, path)
    with pytest.raises(ModelError, match=r"does not end in \.safetensors"):
        adopt_published(path, "kvzap", SPEC)
    renamed = path.rename(tmp_path / "gates.safetensors")
    with pytest.raises(ModelError, match="holds no weights by layer"):
        adopt_published(renamed, "kvzap", SPEC)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kvzap", {"alpha": 0.0}),
        ("kvzap_mlp", {"epochs": 0}),
        ("fast_kvzip", {"sinks": 0}),
        ("locret", {"window": 1}),
    ],
)
def test_settings_out_of_range_are_refused(name, value) -> None:
    with pytest.raises(BadParameter, match="above 0"):
        METHODS.load(name)(**value)
