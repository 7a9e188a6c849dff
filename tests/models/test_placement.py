"""Models whose weights accelerate offloads, wholly or in part, equal the same in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import larder
from larder.core import BadParameter, ModelError
from larder.interop import LarderCache
from larder.models import fingerprint, load, wrap_model
from model_runs import some_ids
from server_core import characters
from tiny_models import tiny

accelerate = pytest.importorskip("accelerate")
LAYERS = 3
TEXT = "a text of some letters, read twice, " * 3
POLICIES = ("full", "snapkv", "criticalkv", "kvzip", "sirllm", "epicache", "d2o")


def parts(last: str) -> dict[str, str]:
    """Device map with one layer in memory, one on the CPU and one elsewhere."""
    places = [f"model.layers.{number}" for number in range(LAYERS)]
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return dict.fromkeys(rest, "cpu") | dict(zip(places, ("cpu", "cpu", last), strict=True))


def by_layers(folder: Path) -> Any:
    """Model with its last layer on a disk."""
    return accelerate.dispatch_model(
        tiny("qwen3", layers=LAYERS), parts("disk"), offload_dir=str(folder), main_device="cpu"
    )


def on_disk(folder: Path) -> Any:
    """Model with all its weights on a disk."""
    return accelerate.disk_offload(tiny("qwen3", layers=LAYERS), str(folder))


def on_the_cpu(folder: Path) -> Any:
    """Model whose weights are loaded from the CPU, module by module."""
    del folder
    return accelerate.cpu_offload(tiny("qwen3", layers=LAYERS), torch.device("cpu"))


def by_blocks(folder: Path) -> Any:
    """Model whose attention and feed-forward modules are loaded as a whole."""
    del folder
    classes = ["Qwen3Attention", "Qwen3MLP"]
    model = tiny("qwen3", layers=LAYERS)
    return accelerate.cpu_offload(model, torch.device("cpu"), preload_module_classes=classes)


def slow(offload: Any) -> Any:
    """Case whose hooks `by_layers` has as well, for some layers."""
    return pytest.param(offload, marks=pytest.mark.slow)


@pytest.mark.extended
@pytest.mark.parametrize("offload", [by_layers, by_blocks, *map(slow, (on_disk, on_the_cpu))])
def test_offloaded_model_equals_the_same_in_memory(offload: Any, tmp_path: Path) -> None:
    module, plain = offload(tmp_path), tiny("qwen3", layers=LAYERS)
    devices = {weight.device.type for weight in module.parameters()}
    assert "meta" in devices and fingerprint(module) == fingerprint(plain)
    tokenizer = characters().tokenizer
    for policy in POLICIES:
        options = {} if policy == "full" else {"budget": 48}
        engines = [larder.Engine(m, tokenizer, policy=policy, **options) for m in (module, plain)]
        got, expected = (engine.generate(TEXT, max_new_tokens=4).ids for engine in engines)
        assert got == expected, policy
    assert {weight.device.type for weight in module.parameters()} == devices


@torch.no_grad()
def test_offloaded_model_generates_the_same_under_a_full_budget(tmp_path: Path) -> None:
    module, prompt = by_layers(tmp_path), torch.tensor([some_ids(96)])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = module.generate(prompt, **options)
    with larder.applied(module, policy="full"):
        assert torch.equal(module.generate(prompt, **options), expected)
    cache = LarderCache(module, "keydiff", 48)
    module(prompt, past_key_values=cache)
    assert 0 < cache.nbytes < LAYERS * 96 * 2 * 2 * 16 * 4


def test_model_loaded_by_name_keeps_layers_on_disk(tmp_path: Path) -> None:
    tiny("qwen3", layers=LAYERS).save_pretrained(tmp_path)
    tokenizer = characters().tokenizer
    loaded = load(str(tmp_path), device_map=parts("disk"), tokenizer=tokenizer)
    module = loaded.decoder.module
    assert {weight.device.type for weight in module.parameters()} == {"cpu", "meta"}
    assert loaded.decoder.spec.device.type == "cpu"


def test_unloaded_meta_weights_are_refused() -> None:
    with torch.device("meta"):
        module = tiny("qwen3")
    with pytest.raises(ModelError, match=r"embed_tokens.weight of Qwen3ForCausalLM lies on meta"):
        larder.Engine(module, characters().tokenizer)


def test_nan_weight_on_disk_is_detected(tmp_path: Path) -> None:
    module = tiny("qwen3", layers=LAYERS)
    module.model.layers[-1].mlp.down_proj.weight.data[0, 0] = torch.nan
    accelerate.disk_offload(module, str(tmp_path))
    with pytest.raises(ModelError, match="weights hold NaN"):
        wrap_model(module)


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ("auto2", r"must be one of auto, balanced.*got 'auto2'"),
        ({"": "tpu"}, r"of the part '' in device_map .*got 'tpu'"),
        (True, "must be a name such as cuda:0.*got True"),
        ({}, "device_map is empty"),
        ({"": "meta"}, "must be one that computes, got 'meta'"),
        ({"": 99}, "is 99, but this machine has"),
        ({"model.layer.0": "cpu"}, r"names 'model.layer.0', which is no part.*'model.layers.0'"),
    ],
)
def test_bad_device_map_is_named(tmp_path: Path, device_map: Any, message: str) -> None:
    tiny("qwen3", layers=2).save_pretrained(tmp_path)
    with pytest.raises(BadParameter, match=message):
        load(str(tmp_path), device_map=device_map, tokenizer=characters().tokenizer)
