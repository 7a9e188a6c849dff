"""Rotations of queries and keys: the spec of each layer equals the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import BatchSegment, Decoder, LayerActivations, wrap_model
from larder.ops import rotate
from model_runs import native_logits, read_on, some_ids
from tiny_models import QUERY_HEADS, tiny

COUNT, START = 12, 700


def before_rotation(architecture: str) -> tuple[str, Callable[[Any], slice]]:
    """The module of an attention layer whose output holds unturned keys, and where."""
    if architecture in ("qwen3", "gemma3"):
        return "k_norm", lambda spec: slice(None)
    if architecture == "phi3":
        first, last = QUERY_HEADS, QUERY_HEADS + 2
        return "qkv_proj", lambda spec: slice(first * spec.head_dim, last * spec.head_dim)
    return "k_proj", lambda spec: slice(None)


def unturned_and_turned(decoder: Decoder, architecture: str) -> list[tuple[Tensor, Tensor]]:
    """Keys [K, Q, D] of each layer before the model turned them, and after."""
    name, part = before_rotation(architecture)
    outputs: list[Tensor] = []
    turned: list[Tensor] = []
    found = [m for n, m in decoder.module.named_modules() if n.endswith(f"self_attn.{name}")]
    hooks = [m.register_forward_hook(lambda _, __, out: outputs.append(out)) for m in found]
    cache = SequenceCache(decoder.spec, "ragged")
    cache.advance(START)

    def watch(row: int, layer: int, recorded: LayerActivations) -> None:
        turned.append(recorded.keys)

    decoder.read([BatchSegment(cache, some_ids(COUNT))], Mode.SCRATCH, watch)
    for hook in hooks:
        hook.remove()
    pairs = zip(decoder.spec.layers, outputs, turned, strict=True)
    return [
        (_heads(out[..., part(spec)].squeeze(0), after.shape), after) for spec, out, after in pairs
    ]


def _heads(out: Tensor, shape: torch.Size) -> Tensor:
    """A projection [Q, K * D] or a norm's [K, Q, D] or [Q, K, D], as [K, Q, D]."""
    if out.dim() == 2:
        return out.unflatten(-1, (shape[0], shape[2])).transpose(0, 1)
    return out if out.shape == shape else out.transpose(0, 1)


def assert_turns(decoder: Decoder, architecture: str) -> None:
    positions = torch.arange(START, START + COUNT)
    pairs = zip(decoder.spec.layers, unturned_and_turned(decoder, architecture), strict=True)
    for spec, (before, after) in pairs:
        assert spec.radians is not None
        assert not torch.allclose(before, after, atol=1e-2)
        expected = rotate(before, positions, torch.tensor(spec.radians))
        torch.testing.assert_close(expected, after, atol=1e-4, rtol=1e-4)


def test_spec_rotation_equals_the_model(architecture, adopted) -> None:
    assert_turns(adopted(architecture), architecture)


def test_layers_have_different_rope_bases(adopted) -> None:
    sliding, full = adopted("gemma3").spec.layers
    assert sliding.radians[1] == pytest.approx(10_000 ** (-1 / 8))
    assert full.radians[1] == pytest.approx(1_000_000 ** (-1 / 8))


def test_half_precision_rotation_is_within_rounding_of_float32(architecture) -> None:
    """The buffers of a model in bfloat16 are rounded, and so are its angles."""
    whole, half = (wrap_model(tiny(architecture, dtype=t)) for t in (torch.float32, torch.bfloat16))
    for one, other in zip(whole.spec.layers, half.spec.layers, strict=True):
        assert other.radians == pytest.approx(one.radians, rel=2**-8)


def rebuilt(architecture: str, **changes: Any) -> Any:
    """A tiny model with another configuration."""
    module = tiny(architecture)
    config = module.config
    for name, value in changes.items():
        setattr(config, name, value)
    config._attn_implementation = "sdpa"
    torch.manual_seed(1)
    return type(module)(config).eval()


def test_partial_rotation_is_supported() -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    module = rebuilt("phi3", partial_rotary_factor=0.5, rope_parameters=rope)
    ids, expected = some_ids(20), native_logits(module, some_ids(20))
    decoder = wrap_model(module)
    assert [len(layer.radians) for layer in decoder.spec.layers] == [4, 4]
    assert_turns(decoder, "phi3")
    got = read_on(decoder, SequenceCache(decoder.spec, "ragged"), ids, 7)
    assert (got - expected).abs().max() < 1e-4


def small(config: str, model: str, **options: Any) -> Decoder:
    import transformers

    common = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(2)
    return wrap_model(
        getattr(transformers, model)(getattr(transformers, config)(**common | options))
    )


def test_layers_without_rope_have_no_frequencies() -> None:
    decoder = small("SmolLM3Config", "SmolLM3ForCausalLM", no_rope_layers=[1, 0])
    turned, still = decoder.spec.layers
    assert turned.radians and still.radians == ()


def test_interleaved_rotation_is_unknown() -> None:
    decoder = small("CohereConfig", "CohereForCausalLM")
    assert [layer.radians for layer in decoder.spec.layers] == [None, None]
