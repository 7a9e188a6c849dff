"""Attention under gates: the loop, hand values, gradients, and gates that are open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from larder.core import ModelError
from larder.models import AttentionInputs, CausalAttention, Decoder, wrap_model
from larder.policy import ProtectedTokens
from larder.training import (
    DecayedAttention,
    GatedAttention,
    GatedLogits,
    MaskedAttention,
    differentiable_states,
    excess,
    straight_through,
)
from references import gated_attention as loop
from tiny_models import tiny

TOKENS, HEADS, KV_HEADS, SIZE = 6, 4, 2, 5
IDS = tuple(range(3, 17))


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with wrap_model(tiny("llama", layers=2)) as decoder:
        yield decoder


def no_gate(position: int, states: Tensor) -> Tensor:
    raise AssertionError


def some_inputs() -> AttentionInputs:
    source = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(heads, TOKENS, SIZE, generator=source) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return AttentionInputs(0, queries, keys, values, SIZE**-0.5, None)


def some_gates() -> Tensor:
    return torch.rand(KV_HEADS, TOKENS, generator=torch.Generator().manual_seed(1))


def attended(attention: GatedAttention, gates: Tensor, inputs: AttentionInputs) -> Tensor:
    weights = attention.weigh(GatedLogits.of(inputs, 0, gates))
    return (weights @ inputs.values[:, None]).flatten(0, 1)


def by_loop(function: Callable[..., Any], gates: Tensor, inputs: AttentionInputs) -> Tensor:
    heads = [
        function(
            inputs.queries[head].tolist(),
            inputs.keys[head // 2].tolist(),
            inputs.values[head // 2].tolist(),
            inputs.scaling,
            gates[head // 2].tolist(),
        )
        for head in range(HEADS)
    ]
    return torch.tensor(heads)


def test_decayed_attention_equals_its_reference(decoder) -> None:
    attention, inputs, betas = DecayedAttention(decoder, no_gate), some_inputs(), some_gates()
    got = attended(attention, betas.log(), inputs)
    torch.testing.assert_close(got, by_loop(loop.decayed, betas, inputs))
    excesses = [loop.excess(own, 1.5) for own in betas.tolist()]
    assert float(excess(attention.held[0], 1.5)) == pytest.approx(sum(excesses) / KV_HEADS)
    assert sum(excesses) > 0


def test_masked_attention_equals_its_reference(decoder) -> None:
    attention, inputs, gates = MaskedAttention(decoder, no_gate), some_inputs(), some_gates()
    got = attended(attention, gates, inputs)
    kept = gates >= 0.5
    assert kept.any() and not kept.all()
    torch.testing.assert_close(got, by_loop(loop.masked, kept, inputs))
    protected = MaskedAttention(decoder, no_gate, ProtectedTokens(1, 2))
    expected = by_loop(partial(loop.masked, sinks=1, recent=2), kept, inputs)
    torch.testing.assert_close(attended(protected, gates, inputs), expected)
    assert not torch.allclose(expected, got)
    hidden = attended(attention, torch.zeros_like(gates), inputs)  # every token sees itself alone
    torch.testing.assert_close(hidden, inputs.values.repeat_interleave(2, 0))


def test_half_lives_hand_values(decoder) -> None:
    """Two tokens of logits 0 and ln 4 at the second query; the first has lost half of its logit."""
    attention = DecayedAttention(decoder, no_gate)
    one = torch.ones(1, 2, 1)
    keys = torch.tensor([[[4.0], [1.0]]]).log()
    values = torch.tensor([[[0.0], [1.0]]])
    inputs = AttentionInputs(0, one, keys, values, 1.0, None)
    got = attended(attention, torch.tensor([[0.5, 0.5]]).log(), inputs)
    # Weights exp(.5 ln 4) = 2 and 1: the value of the second has a third.
    torch.testing.assert_close(got[0, :, 0], torch.tensor([0.0, 1 / 3]))
    torch.testing.assert_close(attention.held[0], torch.tensor([[1.0, 1.5]]))
    # (0 + .5 / 2) / 2 beyond a capacity of 1.
    assert float(excess(attention.held[0], 1.0)) == pytest.approx(0.125)


@pytest.mark.parametrize("changed", [{"sliding_window": 3}, {"sliding_window": 3, "chunk": 3}])
def test_open_gates_respect_windows_and_chunks(decoder, changed) -> None:
    inputs = replace(some_inputs(), **changed)
    plain = CausalAttention(lambda inputs: None).attend(inputs)
    open_gates = torch.zeros(KV_HEADS, TOKENS)
    for attention, gates in (
        (DecayedAttention(decoder, no_gate), open_gates),
        (MaskedAttention(decoder, no_gate), open_gates + 1),
    ):
        torch.testing.assert_close(attended(attention, gates, inputs), plain)


def test_straight_through_gate_passes_its_gradient_unchanged() -> None:
    gates = torch.tensor([0.2, 0.5, 0.9]).requires_grad_()
    chosen = straight_through(gates)
    assert chosen.tolist() == [0.0, 1.0, 1.0]
    (chosen * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert gates.grad is not None and gates.grad.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "is_open", "is_shut"), [(DecayedAttention, 0.0, -9.0), (MaskedAttention, 1.0, 0.0)]
)
def test_open_gates_equal_the_models_states(decoder, kind, is_open, is_shut) -> None:
    plain = differentiable_states(decoder, IDS, CausalAttention(lambda inputs: None))

    def constant(value: float) -> Callable[[int, Tensor], Tensor]:
        return lambda position, states: states.new_full((len(states), KV_HEADS), value)

    opened = kind(decoder, constant(is_open)).hidden_states(IDS)
    torch.testing.assert_close(opened, plain, atol=1e-5, rtol=1e-5)
    shut = kind(decoder, constant(is_shut)).hidden_states(IDS)
    assert not torch.allclose(shut, plain, atol=1e-2)


def test_gates_read_the_input_of_attention_and_get_gradients(decoder) -> None:
    entered, read, leaf = list[Tensor](), list[Tensor](), torch.zeros(2).requires_grad_()
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda m, i, out: entered.append(out[0]))
        for layer in decoder.body.layers
    ]

    def gate(position: int, states: Tensor) -> Tensor:
        read.append(states)
        return (leaf[position] - 1).expand(len(states), KV_HEADS)

    DecayedAttention(decoder, gate).hidden_states(IDS).square().sum().backward()
    for hook in hooks:
        hook.remove()
    assert len(read) == 2
    for own, expected in zip(read, entered, strict=True):
        torch.testing.assert_close(own, expected)
    assert leaf.grad is not None and bool((leaf.grad != 0).all())


def test_attention_with_sinks_is_refused(decoder, monkeypatch) -> None:
    layers = tuple(replace(layer, sinks=(0.0,) * 4) for layer in decoder.spec.layers)
    monkeypatch.setattr(decoder, "spec", replace(decoder.spec, layers=layers))
    with pytest.raises(ModelError, match="attention with sink logits: choose another model"):
        DecayedAttention(decoder, no_gate)
