"""Layers on several devices: each holds its entries where it is computed.

The second device is one of `second_device`; accelerate's own hooks move activations between the
layers. `gpu` runs the same on a CPU and a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import larder
from larder import Engine
from larder.cache import PageArena, SequenceCache
from larder.core import LayerPairing, ModelError, TransformSpec, UsageError
from larder.interop import LarderCache
from larder.models import wrap_model
from second_device import CPU, OTHER, SecondDevice
from server_core import characters
from tiny_models import tiny

accelerate = pytest.importorskip("accelerate")
LAYERS = 3
TEXT = "a text of some letters, read twice, " * 3
# Scores of one layer, of all layers together, by scratch passes, merged, while decoding, dense.
POLICIES = ("full", "snapkv", "h2o", "kvzip", "d2o", "cake", "criticalkv", "streaming_llm")
FAST = ("full", "cake")
PLACES = (CPU, OTHER, OTHER)


class MoveInputsHook(accelerate.hooks.AlignDevicesHook):
    """Hook that moves what a module is given; its weights are on the device already."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module


@pytest.fixture
def device() -> Iterator[SecondDevice]:
    with SecondDevice() as found:
        yield found


def spread(device: SecondDevice, architecture: str = "qwen3") -> Any:
    """Model with its first layer, embeddings and head on the CPU, and the others elsewhere."""
    model = tiny(architecture, layers=LAYERS)
    body = model.model
    places = [*zip(body.layers, PLACES, strict=True), (body.norm, OTHER)]
    places += [(part, CPU) for part in (model.lm_head, body.embed_tokens)]
    places += [(part, CPU) for name, part in body.named_children() if "rotary" in name]
    for part, place in places:
        if place == OTHER:
            device.put(part)
        accelerate.hooks.add_hook_to_module(part, MoveInputsHook(execution_device=place))
    return model


def engines(device: SecondDevice, policy: str, architecture: str = "qwen3") -> list[Engine]:
    """Engines over a spread model and the same on one device."""
    options: dict[str, Any] = {} if policy == "full" else {"budget": 48}
    tokenizer = characters().tokenizer
    models = spread(device, architecture), tiny(architecture, layers=LAYERS)
    return [Engine(model, tokenizer, policy=policy, **options) for model in models]


@pytest.mark.extended
@pytest.mark.parametrize(
    "policy",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES],
)
def test_spread_model_equals_the_same_on_one_device(device: SecondDevice, policy: str) -> None:
    got, expected = (engine.generate(TEXT, max_new_tokens=4) for engine in engines(device, policy))
    assert (got.ids, got.kv_bytes) == (expected.ids, expected.kv_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_other_architectures_answer_the_same_on_several_devices(
    device: SecondDevice, architecture: str
) -> None:
    got, expected = (
        engine.generate(TEXT, max_new_tokens=4).ids
        for engine in engines(device, "snapkv", architecture)
    )
    assert got == expected


@pytest.mark.extended
def test_entries_are_on_the_device_of_their_layer(device: SecondDevice) -> None:
    with wrap_model(spread(device)) as decoder:
        spec = decoder.spec
        assert spec.layer_devices == PLACES and spec.device == CPU
        places = [store.entries().keys.device for store in SequenceCache(spec, "ragged").layers]
    assert places == list(PLACES)


@pytest.mark.extended
def test_saved_cache_is_restored_to_the_devices_of_its_layers(device: SecondDevice) -> None:
    engine = engines(device, "h2o")[0]
    cache, _ = engine.read(TEXT).activate_for("letters")
    there = {name: own.to(CPU) for name, own in cache.state().items()}
    back = SequenceCache.restore(cache.spec, there, cache.meta())
    assert [store.entries().keys.device for store in back.layers] == list(PLACES)
    for own, other in zip(cache.layers, back.layers, strict=True):
        assert torch.equal(own.entries().keys, other.entries().keys)


@pytest.mark.extended
@torch.no_grad()
def test_spread_model_generates_the_same_under_a_full_budget(device: SecondDevice) -> None:
    module, prompt = spread(device), torch.tensor([[n % 90 + 3 for n in range(96)]])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = tiny("qwen3", layers=LAYERS).generate(prompt, **options)
    with larder.applied(module, policy="full"):
        assert torch.equal(module.generate(prompt, **options), expected)
    cache = LarderCache(module, "keydiff", 48)
    module(prompt, past_key_values=cache)
    assert 0 < cache.nbytes < LAYERS * 96 * 2 * 2 * 16 * 4


@pytest.mark.extended
def test_layers_held_together_and_pages_on_several_devices_are_refused(
    device: SecondDevice,
) -> None:
    refusal = r"computed on cpu, xpu:0.*device_map=\{'': DEVICE\}"
    with wrap_model(spread(device)) as decoder:
        with pytest.raises(UsageError, match=refusal):
            SequenceCache(decoder.spec, "paired", pairing=LayerPairing())
        with pytest.raises(UsageError, match=refusal):
            SequenceCache(decoder.spec, "ragged", transform=TransformSpec())
        with pytest.raises(ModelError, match="several devices, but pages lie on one"):
            decoder.use_pages(PageArena(decoder.spec, 8))


def test_second_device_detects_mixed_devices(device: SecondDevice) -> None:
    here, there = torch.ones(3), torch.ones(3, device=OTHER)
    assert (there[1:] + 1).device == OTHER and there.cpu().device == CPU
    assert there.to(here).device == CPU and here.to(OTHER).device == OTHER == there.device
    assert here.device == CPU
    mixed: list[Callable[[], object]] = [
        lambda: here + there,
        lambda: torch.cat([there, here]),
        lambda: here[there.long()],
    ]
    for call in mixed:
        with pytest.raises(RuntimeError, match="several devices"):
            call()
