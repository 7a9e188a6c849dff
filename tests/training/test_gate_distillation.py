"""Methods that train gates by distillation: what they learn, and that their weights fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from larder.core import BadParameter
from larder.models import Card, Decoder, LearnedWeights, wrap_model
from larder.policy import PROVIDERS
from larder.training import (
    PASSAGE_METHODS,
    CorpusSplit,
    DecayedAttention,
    GateDistillation,
    Passage,
    input_scalings,
    token_windows,
)
from tiny_models import tiny

# Settings under which a few steps show what is learned, and the metric that then falls.
SMALL: dict[str, dict[str, Any]] = {
    "trim": {"inner": 4, "bias": 3.0, "weight": 3.0},
    "global_retention": {"inner": 4, "channels": 3, "bias": 3.0, "weight": 3.0},
    "attention_gate": {"inner": 3, "weight": 3.0, "sinks": 1, "recent": 2},
}
SHARES = {"trim": "held", "global_retention": "held", "attention_gate": "kept"}
NAMES = sorted(SMALL)


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with wrap_model(tiny("llama", layers=2)) as decoder:
        yield decoder


def a_method(name: str, **settings: Any) -> GateDistillation[Any]:
    return PASSAGE_METHODS.load(name)(**{**SMALL[name], **settings})


def passages(count: int = 4, tokens: int = 24) -> list[Passage]:
    source = torch.Generator().manual_seed(0)
    return [
        Passage(
            f"text {n}",
            "texts",
            CorpusSplit.TRAIN,
            0,
            tuple(torch.randint(3, 60, (tokens,), generator=source).tolist()),
        )
        for n in range(count)
    ]


def fitted(decoder: Decoder, name: str, **settings: Any) -> list[dict[str, Tensor]]:
    method = a_method(name, **settings)
    return [dict(o) for o in method.fit(decoder, passages(), 0, lambda done, total: None)]


def test_every_gate_method_is_covered() -> None:
    found = [
        n for n in PASSAGE_METHODS.names() if issubclass(PASSAGE_METHODS.load(n), GateDistillation)
    ]
    assert sorted(found) == NAMES


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_penalty(decoder, name) -> None:
    few, many = (fitted(decoder, name, epochs=epochs, rate=0.1) for epochs in (1, 8))
    method = a_method(name)
    shares = [method.test(decoder, layers, passages())[SHARES[name]] for layers in (few, many)]
    assert shares[1] < shares[0] - 0.05
    again = fitted(decoder, name, epochs=1, rate=0.1)
    for key, tensor in few[0].items():
        assert torch.equal(again[0][key], tensor)
    assert all(weight.requires_grad for weight in decoder.module.parameters())
    assert all(weight.grad is None for weight in decoder.module.parameters())


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_divergence(decoder, name) -> None:
    """Without a penalty, gates that begin shut open where the divergence falls by it."""
    settings = {"bias": -1.0, "weight": 0.0}
    before, after = (
        a_method(name, **settings).test(
            decoder, fitted(decoder, name, epochs=8, rate=rate, **settings), passages()
        )["kl"]
        for rate in (1e-12, 0.1)
    )
    assert after < 0.7 * before


@pytest.mark.parametrize(
    ("name", "held", "expected"),
    [
        ("trim", [[1.0, 2.0], [0.0, 0.0]], 0.375),  # one of four numbers is 1 of 2 tokens too high
        ("global_retention", [[1.0, 2.0], [0.0, 0.0]], 0.0),  # both hold half a token, then one
        ("global_retention", [[1.0, 2.0], [0.0, 1.0]], 0.375),  # 1.5 in the mean: .5 of 2 tokens
    ],
)
def test_capacity_is_shared_in_global_retention_only(decoder, name, held, expected) -> None:
    attention = DecayedAttention(decoder, lambda index, states: states)
    attention.held = {index: torch.tensor([row]) for index, row in enumerate(held)}
    method = a_method(name, capacity=0.5)
    assert float(method.penalty(attention, 2)) == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_weights_fit_their_provider(decoder, name) -> None:
    layers, fingerprint = tuple(fitted(decoder, name)), decoder.spec.fingerprint
    learned = LearnedWeights(Card(name, (fingerprint,)), layers)
    decoder.gates.put(name, PROVIDERS.load(name)(), learned)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_state_scaling_is_folded_into_the_weights(decoder, name) -> None:
    """Without a step, weights give what the first ones give on scaled states."""
    method = a_method(name, rate=1e-12)
    layers = method.fit(decoder, passages(), 0, lambda done, total: None)
    first = method.first_layers(decoder.spec, 0)
    states = torch.randn(5, decoder.spec.width, generator=torch.Generator().manual_seed(3))
    for scaling, own, raw in zip(
        input_scalings(decoder, [each.ids for each in passages()]), layers, first, strict=True
    ):
        expected = method.provider.gate(scaling.apply(states), raw)
        torch.testing.assert_close(
            method.provider.gate(states, own), expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [{"inner": 0}, {"epochs": 0}, {"rate": 0.0}])
def test_settings_are_checked(name, wrong) -> None:
    with pytest.raises(BadParameter, match=f"{name} needs numbers above 0"):
        a_method(name, **wrong)


def test_long_passages_are_split_into_windows() -> None:
    """25 tokens in windows of 10: the last 5 are half of one; the last 4 of 24 are less."""
    found = [len(ids) for ids in token_windows([*passages(1, 25), *passages(1, 24)], 10)]
    assert found == [10, 10, 5, 10, 10]
    assert token_windows(passages(1, 3), 10) == [passages(1, 3)[0].ids]
