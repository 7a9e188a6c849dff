"""Every family of the support table, inside transformers' own calls, against the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import larder
from architectures.families import Family, Status, with_status
from architectures.figures import BUDGET, GREEDY, POLICIES
from covering import one_in
from larder.core import POSITION_BYTES, ModelError
from larder.interop import LarderCache
from larder.models import wrap_model
from model_runs import native_logits, some_ids
from tensor_memory import peak_bytes

TOLERANCE = 1e-4  # float32, on logits whose spread is 0.5 or more
PROMPT, STEPS, MANY_STEPS = 40, 6, 64  # tokens
LONG_PROMPT = 256  # tokens
FULL_PEAK = 1.25  # bytes of a full cache in Larder's attention, relative to the model alone
WINDOW = 8  # tokens of the sliding windows of the registry


def named(family: Family) -> str:
    return family.name


supported = pytest.mark.parametrize("family", with_status(Status.SUPPORTED), ids=named)


@cache
def model_of(family: Family) -> Any:
    return family.model()


def some_prompt(length: int = PROMPT) -> Tensor:
    return torch.tensor([some_ids(length)])


def generated(model: Any, prompt: Tensor, steps: int = STEPS) -> list[int]:
    return model.generate(prompt, max_new_tokens=steps, **GREEDY)[0, prompt.shape[1] :].tolist()


@supported
@torch.no_grad()
def test_logits_under_a_full_cache_equal_the_model(family: Family) -> None:
    model, ids = model_of(family), some_prompt(PROMPT + STEPS)
    expected, cache = native_logits(model, ids[0].tolist()), LarderCache(model, "full")
    parts = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
    got = torch.cat([model(part, past_key_values=cache).logits[0].float() for part in parts])
    assert expected.std() > 0.5
    assert (got - expected).abs().max() < TOLERANCE


@supported
def test_greedy_tokens_under_a_full_cache_equal_the_model(
    family: Family, steps: int = STEPS
) -> None:
    model, prompt = model_of(family), some_prompt()
    with larder.applied(model, policy="full"):
        got = generated(model, prompt, steps)
    assert got == generated(model, prompt, steps)


@pytest.mark.parametrize("family", one_in(4, with_status(Status.SUPPORTED)), ids=named)
def test_batched_beams_under_a_full_cache_equal_the_model(family: Family) -> None:
    model = model_of(family)
    prompts = torch.tensor([some_ids(12, seed=1), some_ids(12, seed=2)])
    options = {**GREEDY, "num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 4}
    expected = model.generate(prompts, **options)
    with larder.applied(model, policy="full"):
        assert torch.equal(model.generate(prompts, **options), expected)


@pytest.mark.slow
@supported
def test_many_greedy_tokens_under_a_full_cache_equal_the_model(family: Family) -> None:
    test_greedy_tokens_under_a_full_cache_equal_the_model(family, MANY_STEPS)


def under_policies() -> Iterator[Any]:
    """Families under policies: each under all, and under one by turns in the default suite."""
    for number, family in enumerate(with_status(Status.SUPPORTED)):
        for other, (name, policy) in enumerate(POLICIES.items()):
            marks = [] if other == number % len(POLICIES) else [pytest.mark.extended]
            yield pytest.param(family, policy, id=f"{family.name}-{name}", marks=marks)


@pytest.mark.parametrize("family, policy", list(under_policies()))
@torch.no_grad()
def test_policies_hold_fewer_bytes(family: Family, policy: str) -> None:
    """Held after prefill; generation continues behind it."""
    model, prompt = model_of(family), some_prompt()
    whole = dynamic_bytes(model(prompt).past_key_values)
    cache = LarderCache(model, policy, BUDGET)
    model(prompt, past_key_values=cache)
    assert 0 < cache.nbytes < whole
    with larder.applied(model, policy, BUDGET):
        assert len(generated(model, prompt)) == STEPS


@supported
@torch.no_grad()
def test_full_cache_has_the_bytes_of_transformers_and_positions(family: Family) -> None:
    """Those of a cache of transformers; Larder's own has a position per entry besides."""
    model, prompt = model_of(family), some_prompt()
    cache = LarderCache(model, "full")
    model(prompt, past_key_values=cache)
    spec = cache.attachment.decoder.spec
    assert spec.full_bytes(PROMPT) == dynamic_bytes(model(prompt).past_key_values)
    held = sum(layer.bytes_per_token(spec.dtype) for layer in spec.managed) * PROMPT
    held += sum(layer.bytes_per_token(spec.dtype) * WINDOW for layer in spec.windows)
    held += spec.recurrent_bytes
    layers = len(spec.managed) * PROMPT + len(spec.windows) * WINDOW
    assert cache.nbytes == held + layers * POSITION_BYTES


def dynamic_bytes(cache: Any) -> int:
    """Bytes of keys, values and recurrent states in a cache of transformers."""
    held = [vars(layer) for layer in cache.layers]
    sides = [own.get(side) for own in held for side in ("keys", "values")]
    kinds = [own.get(kind, {}) for own in held for kind in ("conv_states", "recurrent_states")]
    tensors = [*sides, *(tensor for kind in kinds for tensor in kind.values())]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.slow
@supported
def test_peak_bytes_are_below_plain_generation(family: Family) -> None:
    if family.name == "Phi-3 (long-rope)":
        pytest.skip("its short regime ends before the prompt")
    model, prompt = model_of(family), some_prompt(LONG_PROMPT)

    def peak_under(policy: str, **sizes: Any) -> int:
        with larder.applied(model, policy=policy, **sizes):
            return peak_bytes(lambda: generated(model, prompt, 2))

    plain = peak_bytes(lambda: generated(model, prompt, 2))
    in_blocks = peak_under("keydiff", budget="25%", block=LONG_PROMPT // 8)
    assert in_blocks < plain / 2  # 60 to 98 percent less at 1,024 tokens
    assert peak_under("full") < plain * FULL_PEAK


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "DeepSeek-V3", "LFM2"])
def test_peak_bytes_with_each_kind_of_layer_are_below_plain_generation(name: str) -> None:
    test_peak_bytes_are_below_plain_generation(
        next(family for family in with_status(Status.SUPPORTED) if family.name == name)
    )


@supported
def test_bfloat16_model_passes_verification(family: Family) -> None:
    decoder = wrap_model(family.model(torch.bfloat16))
    assert decoder.spec.dtype is torch.bfloat16


@pytest.mark.parametrize("family", with_status(Status.REFUSED), ids=named)
def test_refused_families_name_the_reason_in_one_line(family: Family) -> None:
    with pytest.raises(ModelError, match=family.refusal) as caught:
        wrap_model(family.model())
    assert "\n" not in str(caught.value)
