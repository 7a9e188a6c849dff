"""Gradients of a scratch pass against a model's own attention, and kvgrad on whole texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from larder import Policy
from larder.core import Mode, RecurrentSpec, ScratchPrompt, UsageError
from larder.models import BatchSegment, Decoder, wrap_model
from larder.policy import PROVIDERS, GradientProvider, select_providers
from larder.prefill import Whole, gradient_inputs, no_progress
from model_runs import some_ids
from tiny_models import tiny

ALL = select_providers(PROVIDERS.names(), GradientProvider)


def own_gradients(decoder: Decoder, ids: tuple[int, ...], copied: int) -> dict[int, torch.Tensor]:
    """Norms for the last tokens of a text, one at a time, on the model's own attention.

    The objective is a sum over the copied tokens alone.
    """
    module = decoder.module
    layers = module.base_model.layers
    outputs: dict[int, torch.Tensor] = {}
    states: list[torch.Tensor] = []

    def keep(index: int):
        def hook(attention, args, output):
            output[0].retain_grad()
            outputs[index] = output[0]

        return hook

    hooks = [layer.self_attn.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
    hooks.append(
        layers[-1].register_forward_hook(
            lambda m, a, out: states.append(out[0] if isinstance(out, tuple) else out)
        )
    )
    module.set_attn_implementation("eager")
    with torch.enable_grad():
        module.base_model(input_ids=torch.tensor([ids]), use_cache=False)
        states[0].flatten(0, -2)[-copied:].square().sum().backward()
    module.set_attn_implementation("larder")
    module.zero_grad()
    for hook in hooks:
        hook.remove()
    return {index: out.grad.flatten(0, -2)[-copied:].norm(dim=-1) for index, out in outputs.items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "gemma3"])
def test_gradients_over_a_cache_equal_the_model(architecture, lane_for) -> None:
    text, copy = some_ids(20), some_ids(7, seed=3)
    with wrap_model(tiny(architecture)) as decoder:
        for parameter in decoder.module.parameters():
            parameter.requires_grad_(True)
        expected = own_gradients(decoder, (*text, *copy), len(copy))
        lane = lane_for(decoder, Policy.parse("snapkv()").planner)
        decoder.read([BatchSegment(lane.cache, text)], Mode.APPEND)
        before = lane.cache.nbytes
        with torch.no_grad():
            got = gradient_inputs(decoder, lane.cache, ScratchPrompt(copy, (0, 20)), ALL)
        assert lane.cache.nbytes == before and lane.cache.next_position == 20
        assert not any(p.grad is not None for p in decoder.module.parameters())
    assert got.keys() == expected.keys()
    for index, own in expected.items():
        torch.testing.assert_close(got[index]["gradients"], own, rtol=2e-3, atol=1e-5)


def test_gradients_of_a_frozen_model_are_computed_on_request_only(watched, lane_for) -> None:
    lane = lane_for(watched)
    watched.read([BatchSegment(lane.cache, some_ids(9))], Mode.APPEND)
    prompt = ScratchPrompt(some_ids(4), (0, 9))
    needing = [p.requires_grad for p in watched.module.parameters()]
    for parameter in watched.module.parameters():
        parameter.requires_grad_(False)
    found = gradient_inputs(watched, lane.cache, prompt, ALL)
    for parameter, needed in zip(watched.module.parameters(), needing, strict=True):
        parameter.requires_grad_(needed)
    assert len(found) == 3 and all(float(own["gradients"].min()) > 0 for own in found.values())
    assert gradient_inputs(watched, lane.cache, prompt, {}) == {}


def test_recurrent_models_are_refused(watched, lane_for, monkeypatch) -> None:
    lane, prompt = lane_for(watched), ScratchPrompt(some_ids(4), (0, 9))
    state = RecurrentSpec(0, "state", (1,), torch.float32)
    monkeypatch.setattr(watched, "spec", replace(watched.spec, recurrent=(state,)))
    with pytest.raises(UsageError, match="recurrent"):
        gradient_inputs(watched, lane.cache, prompt, ALL)


def test_kvgrad_prefills_whole_and_by_blocks(watched, reader_for, lane_for) -> None:
    planner = Policy.parse("whole() > protect(sinks=1, recent=2) > kvgrad(chunk=9) > uniform()")
    planner = planner.planner
    reader, lane = reader_for(watched, planner, 8, 24), lane_for(watched, planner)
    Whole().read(reader, [lane], some_ids(24), no_progress)
    assert not reader.wrong
    assert {length for lengths in lane.cache.lengths() for length in lengths} == {8}
