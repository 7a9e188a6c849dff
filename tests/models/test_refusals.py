"""Refusals of unsupported models at loading, with the reason."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from larder.core import BadParameter, LayerSpec, ModelError
from larder.models import (
    AttentionProbe,
    Decoder,
    attend,
    check_attention_kinds,
    check_rope,
    load,
    wrap_model,
)
from model_runs import native_logits, some_ids
from tiny_models import tiny

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def built(name: str, **options: Any) -> Any:
    """A random model of a class that this version of transformers may not have."""
    if name not in dir(transformers):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind = vars(transformers).get(name) or transformers.__getattr__(name)
    torch.manual_seed(0)
    return kind(kind.config_class(**options)).eval()


def refused(module: Any, reason: str) -> None:
    """Adopting raises in one line, and the model is left as it was."""
    former = module.config._attn_implementation
    with pytest.raises(ModelError, match=reason) as caught:
        wrap_model(module)
    assert "\n" not in str(caught.value)
    assert module.config._attn_implementation == former


def test_unknown_attention_argument_is_refused() -> None:
    sides = (torch.zeros(1, 1, 2, 4),) * 3
    with pytest.raises(ModelError, match="'positional_bias', which Larder does not support"):
        attend(nn.Linear(1, 1), *sides, larder=AttentionProbe(), positional_bias=1.0)


@pytest.mark.extended
def test_architectures_without_an_attention_interface_are_refused() -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2}
    refused(built("BloomForCausalLM", **shape), "BloomForCausalLM .*AttentionInterface")
    small = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    refused(built("CodeGenForCausalLM", **small), "CodeGenForCausalLM .*AttentionInterface")


class LayerWithoutAttention(nn.Module):
    """A layer that never asks for attention."""

    attention_type = "full_attention"

    def forward(self, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return hidden_states


def test_layer_without_an_attention_call_is_refused() -> None:
    module = tiny("llama")
    module.model.layers[1] = LayerWithoutAttention()
    refused(module, r"has 2 layers with attention, but only \[0\] call it")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_undeclared_attention_behavior_is_refused(dtype: torch.dtype) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def sharper(module: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return sdpa_attention_forward(module, 2 * query, *rest, **named)

    AttentionInterface.register("sharper", sharper)
    try:
        module = tiny("llama").to(dtype)
        module.set_attn_implementation("sharper")
        refused(module, "other logits")
    finally:
        del AttentionInterface._global_mapping["sharper"]


def test_dropout_is_not_silently_left_out() -> None:
    module = tiny("llama")
    module.config.attention_dropout = 0.5
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with Decoder(module) as decoder:
        module.model.layers[0].self_attn.train()
        from larder.cache import SequenceCache
        from model_runs import read_on

        with pytest.raises(ModelError, match="dropout is 0.5: put the model in eval mode"):
            read_on(decoder, SequenceCache(decoder.spec, "ragged"), some_ids(4), 4)


def test_call_without_a_forward_batch_is_refused(architecture) -> None:
    with Decoder(tiny(architecture)) as decoder:
        with pytest.raises(ModelError, match="called without a forward batch"):
            native_logits(decoder.module, some_ids(4))


def test_release_restores_the_model(architecture) -> None:
    module = tiny(architecture)
    expected, former = native_logits(module, some_ids(9)), module.config._attn_implementation
    decoder = wrap_model(module)
    assert module.config._attn_implementation == "larder"
    decoder.release()
    assert module.config._attn_implementation == former
    assert torch.equal(native_logits(module, some_ids(9)), expected)


def saved(folder: Path, **changes: Any) -> str:
    """A tiny model's folder with changes in its config."""
    tiny("llama").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder)


def entry(**rope: Any) -> dict[str, Any]:
    """RoPE as both spellings of a config have it."""
    return {"rope_scaling": rope, "rope_parameters": rope | {"rope_theta": 10000.0}}


@pytest.mark.filterwarnings("ignore")
def test_dynamic_rope_is_refused(tmp_path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(ModelError, match="RoPE is 'dynamic'"):
        load(saved(tmp_path, **entry(**rope)))


def test_longrope_without_an_original_length_is_refused() -> None:
    config = a_config()
    config.rope_parameters = {"rope_type": "longrope"}
    with pytest.raises(ModelError, match="set original_max_position_embeddings"):
        check_rope(config)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.filterwarnings("ignore")
def test_rope_with_fixed_frequencies_is_supported(tmp_path, kind) -> None:
    rope = entry(rope_type=kind, factor=2.0, original_max_position_embeddings=64)
    folder = saved(tmp_path, **rope)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert wrap_model(module).spec.layers


def test_rope_base_unreadable_by_this_transformers_is_refused(tmp_path) -> None:
    """Version 4 takes the default base, silently, for a config that version 5 wrote."""
    spelled = {"rope_type": "default", "rope_theta": 5000.0}
    folder = saved(tmp_path, rope_parameters=spelled)
    config = transformers.AutoConfig.from_pretrained(folder)
    if Version(transformers.__version__) < Version("5.0.0.dev0"):
        with pytest.raises(ModelError, match="does not read"):
            check_rope(config)
        config.rope_theta = 5000.0
    check_rope(config)


def damaged_seed(folder: Path) -> Path:
    """The bundled model with one weight that is not a number."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(str(files("larder.models") / "seed"), folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_nan_weights_are_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match="NaN"):
        load(str(damaged_seed(tmp_path / "model")))


def test_folders_without_a_model_are_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="no config.json"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="no weights"):
        load(str(tmp_path))
    with pytest.raises(ModelError, match="is a file"):
        load(str(tmp_path / "config.json"))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(str(tmp_path))


def test_unknown_hub_names_are_refused() -> None:
    with pytest.raises(ModelError, match="'nobody/nothing' cannot be loaded"):
        load("nobody/nothing")


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(BadParameter, match="float32, bfloat16, float16"):
        load(dtype="float12")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_missing_devices_are_refused() -> None:
    with pytest.raises(ModelError, match="device cuda cannot be used"):
        load(device="cuda")


@pytest.mark.parametrize("device", ["meta", "meta:0"])
def test_meta_devices_are_refused(device: str) -> None:
    with pytest.raises(BadParameter, match="device must be a device that computes"):
        load(device=device)


def test_device_of_a_missing_package_is_refused() -> None:
    with pytest.raises(ModelError, match="device hpu cannot be used: No module"):
        load(device="hpu")


def a_config(**options: Any) -> Any:
    return transformers.LlamaConfig(**SHAPE, **options)


def layers_with(*windows: int | None) -> list[LayerSpec]:
    return [LayerSpec(n, 2, 1, 16, 0.25, window) for n, window in enumerate(windows)]


@pytest.mark.parametrize(
    "kinds, windows, reason",
    [
        (["full_attention", "sliding_attention"], (None, None), "Layer 1 .* the window None"),
        (["full_attention", "full_attention"], (8, None), "Layer 0 .* the window 8"),
        (["full_attention", "chunked_attention"], (None, None), "kind 'chunked_attention'"),
        (["linear_attention", "full_attention"], (None, None), "kind 'linear_attention'"),
    ],
)
def test_unverified_attention_kinds_are_refused(kinds, windows, reason) -> None:
    config = a_config()
    config.layer_types = kinds
    with pytest.raises(ModelError, match=reason):
        check_attention_kinds(config, layers_with(*windows))


def test_chunk_size_without_attention_kinds_is_refused() -> None:
    config = a_config()
    config.attention_chunk_size = 32
    with pytest.raises(ModelError, match="chunks of 32 tokens"):
        check_attention_kinds(config, layers_with(None, None))


@pytest.mark.parametrize("kinds", [None, ["sliding_attention", "full_attention"]])
def test_verified_attention_kinds_are_accepted(kinds) -> None:
    config = a_config()
    config.layer_types = kinds
    check_attention_kinds(config, layers_with(8, None))


def test_model_held_by_another_decoder_is_refused() -> None:
    module = tiny("llama")
    former = module.config._attn_implementation
    with Decoder(module):
        with pytest.raises(ModelError, match="held by another decoder"):
            Decoder(module)
        assert module.config._attn_implementation == "larder"
    assert module.config._attn_implementation == former
