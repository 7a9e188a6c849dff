"""A verification that fails names the part that differs; quantized weights have their tolerance."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from larder.core import ModelError
from larder.models import TOLERANCE, fingerprint, has_quantized_weights, wrap_model
from model_runs import native_logits, some_ids
from tiny_models import tiny


def refusal(module: Any) -> str:
    """Message of the refusal, after which the model is as it was."""
    former = module.config._attn_implementation
    with pytest.raises(ModelError) as caught:
        wrap_model(module)
    assert module.config._attn_implementation == former and "\n" not in str(caught.value)
    return str(caught.value)


@contextmanager
def attention_function(change: Callable[..., tuple[torch.Tensor, Any]]) -> Any:
    """An attention function of transformers under the name `changed`."""
    from transformers import AttentionInterface

    AttentionInterface.register("changed", change)
    try:
        yield
    finally:
        del AttentionInterface._global_mapping["changed"]


def sharper_in_layer_1(module: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query * (1 + module.layer_idx), *rest, **named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verification_names_the_differing_layer(dtype: torch.dtype) -> None:
    with attention_function(sharper_in_layer_1):
        module = tiny("llama").to(dtype)
        module.set_attn_implementation("changed")
        result = refusal(module)
    tolerance = {torch.float32: "0.001", torch.bfloat16: "0.15"}[dtype]
    assert f"tolerance {tolerance} in {dtype}" in result
    assert "attention of layer 1 (LlamaAttention with 'changed'" in result
    assert "attn_implementation='sdpa'" in result


def test_verification_detects_attention_to_later_tokens() -> None:
    def both_ways(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        key, value = (side.repeat_interleave(2, 1) for side in (key, value))
        out = nn.functional.scaled_dot_product_attention(query, key, value)
        return out.transpose(1, 2), None

    with attention_function(both_ways):
        module = tiny("llama")
        module.set_attn_implementation("changed")
        result = refusal(module)
    assert "attention, which looks at later tokens" in result and "causal language model" in result


def test_verification_names_a_too_coarse_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, 1e-4)
    result = refusal(tiny("llama").to(torch.bfloat16))
    assert "tolerance 0.0001 in torch.bfloat16" in result
    assert (
        "The part that differs: dtype torch.bfloat16" in result and "Load it in float32" in result
    )


def test_verification_names_overflowing_and_mixed_dtypes() -> None:
    module = tiny("llama")
    module.model.layers[1].mlp.down_proj.weight.data *= 1e5
    module.model.layers[1].mlp.up_proj.weight.data *= 1e2
    for weight in module.parameters():
        weight.data.clamp_(-6e4, 6e4)
    assert "its dtype torch.float16 overflows" in refusal(module.to(torch.float16))
    mixed = tiny("llama")
    mixed.model.layers[1].to(torch.bfloat16)
    assert "torch.bfloat16, torch.float32: bring it to one dtype" in refusal(mixed)


class QuantizedLinear(nn.Module):
    """Linear layer with weights of 8 bits and activations rounded together to some bits."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.levels = 2 ** (bits - 1) - 1

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        step = states.abs().max() / self.levels
        return ((states / step).round() * step) @ (self.weight * self.scale).T


def quantized(bits: int, seed: int = 0) -> Any:
    module = tiny("qwen3", seed=seed)
    for layer in module.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, QuantizedLinear(getattr(layer.mlp, name), bits))
    return module


def test_quantized_weights_have_their_own_tolerance() -> None:
    module = quantized(bits=8)
    assert has_quantized_weights(module) and not has_quantized_weights(tiny("qwen3"))
    ids = some_ids(24)
    change = (native_logits(module, ids[:12]) - native_logits(module, ids)[:12]).abs().max()
    assert change > 1e-3  # more than the tolerance of float32
    assert wrap_model(module).spec.dtype is torch.float32
    assert fingerprint(quantized(8)) != fingerprint(quantized(8, seed=1))


def test_verification_names_quantized_weights_that_depend_on_later_tokens() -> None:
    result = refusal(quantized(bits=3))
    assert "The part that differs: quantized weights: its own logits" in result
    assert "tolerance 0.15 in torch.float32" in result
