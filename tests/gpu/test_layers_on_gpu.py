"""Layers on a CPU and a GPU, computed on both: what `tests/models/test_several_devices.py` has on
a second device that is no device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import larder
from larder import Engine
from model_runs import some_ids
from server_core import characters
from tiny_models import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LAYERS = 3
TEXT = "a text of some letters, read twice, " * 3
POLICIES = ("full", "snapkv", "h2o", "kvzip", "d2o", "cake", "criticalkv", "streaming_llm")


def spread(first: str | int = "cpu", others: str | int = 0) -> Any:
    """Model whose first layer is computed on one device, and the others on another."""
    accelerate = pytest.importorskip("accelerate")
    places = [f"model.layers.{number}" for number in range(LAYERS)]
    parts = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "lm_head"), first)
    parts |= {places[0]: first, **dict.fromkeys((*places[1:], "model.norm"), others)}
    return accelerate.dispatch_model(tiny("qwen3", layers=LAYERS), parts, main_device=first)


@pytest.mark.parametrize("first", ["cpu", 0])
@pytest.mark.parametrize("policy", POLICIES)
def test_spread_model_equals_the_same_on_one_device(policy: str, first: str | int) -> None:
    options: dict[str, Any] = {} if policy == "full" else {"budget": 48}
    others = 0 if first == "cpu" else "cpu"
    if first == 0:  # accelerate offloads what a map puts on the CPU beside a GPU
        model, tokenizer = spread(0, others), characters().tokenizer
        assert Engine(model, tokenizer, policy="full").loaded.decoder.spec.device.type == "cuda"
    else:
        model, tokenizer = spread(), characters().tokenizer
    engines = [
        Engine(own, tokenizer, policy=policy, **options)
        for own in (model, tiny("qwen3", layers=LAYERS))
    ]
    got, expected = (engine.generate(TEXT, max_new_tokens=4).ids for engine in engines)
    assert got == expected
    places = engines[0].loaded.decoder.spec.layer_devices
    assert [place.type for place in places] == (["cpu", "cuda", "cuda"] if first == "cpu" else [])


@torch.no_grad()
def test_spread_model_generates_the_same_under_a_full_budget() -> None:
    prompt = torch.tensor([some_ids(96)])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = tiny("qwen3", layers=LAYERS).generate(prompt, **options)
    module = spread()
    with larder.applied(module, policy="full"):
        assert torch.equal(module.generate(prompt, **options).cpu(), expected)
    with larder.applied(module, policy="h2o", budget=48) as run:
        module.generate(prompt, **options)
    assert run.cache is not None and run.cache.nbytes > 0
