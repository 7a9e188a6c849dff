"""Caches exported to transformers' DynamicCache, and taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from architectures.families_latent import FAMILIES
from interop.replay import assert_same_entries
from larder import Engine
from larder.core import CacheError, Mode, Plan
from larder.interop import LarderCache, dynamic_cache_of
from larder.models import BatchSegment
from model_runs import some_ids
from server_core import characters

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SNAPKV = "protect(sinks=2, recent=4) > snapkv(window=4) > uniform()"
KEYDIFF = "blockwise(tokens=16) > protect(sinks=2, recent=4) > keydiff() > uniform()"
POLICIES = ["full", SNAPKV, KEYDIFF, "streaming_llm"]


def text(tokens: int = 50, seed: int = 0) -> Tensor:
    return torch.tensor([some_ids(tokens, seed=seed)])


def read_cache(model: Any, policy: str, ids: Tensor) -> LarderCache:
    cache = LarderCache(model, policy, None if policy == "full" else 24)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def positions_of(model: Any, ids: Tensor, start: int) -> Tensor:
    return torch.arange(start, start + ids.shape[1]).expand(ids.shape[0], -1)


@pytest.mark.parametrize("name", ["Gemma 3n", "DeepSeek-V2"])
@torch.no_grad()
def test_shared_layers_and_latents_round_trip(name: str) -> None:
    model = next(family for family in FAMILIES if family.name == name).model()
    cache, new = read_cache(model, SNAPKV, text()), text(1, seed=1)
    back = LarderCache.from_dynamic_cache(model, cache.to_dynamic_cache(), SNAPKV, 24)
    exported = cache.to_dynamic_cache()
    expected = model(new, past_key_values=cache).logits
    for given in (exported, back):
        got = model(new, past_key_values=given, position_ids=torch.tensor([[50]])).logits
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert_same_entries(back.sequences[0], cache.sequences[0])


@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_export_continues_as_the_cache(model: Any, policy: str) -> None:
    """Step by step through the LarderCache, and in one call through the export."""
    cache, new = read_cache(model, policy, text()), text(6, seed=1)
    exported = cache.to_dynamic_cache()
    assert isinstance(exported, DynamicCache) and exported.get_seq_length() == 50
    own = cache.fork()
    decoder = own.attachment.decoder
    segment = BatchSegment(own.sequences[0], tuple(new[0].tolist()))
    expected = decoder.forward_logits([segment], Mode.SCRATCH, range(6))
    for given in ({}, {"position_ids": positions_of(model, new, 50)}):
        fresh = cache.to_dynamic_cache()
        got = model(new, past_key_values=fresh, **given).logits[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        assert fresh.get_seq_length() == 56
    assert exported.get_seq_length() == 50


@pytest.mark.parametrize("policy", ["full", SNAPKV])
def test_generate_continues_an_export(model: Any, policy: str) -> None:
    ids = torch.cat([text(), text(seed=2)])
    cache = read_cache(model, policy, ids)
    whole = torch.cat([ids, torch.cat([text(1, seed=1), text(1, seed=3)])], 1)
    options = {**GREEDY, "max_new_tokens": 8}
    exported = cache.to_dynamic_cache()
    got = model.generate(whole, past_key_values=exported, **options)
    expected = model.generate(whole, past_key_values=cache, **options)
    assert got.tolist() == expected.tolist()


def test_full_export_equals_the_models_cache(model: Any) -> None:
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text(), past_key_values=own)
    exported = read_cache(model, "full", text()).to_dynamic_cache()
    for one, other in zip(exported.layers, own.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(one.values, other.values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_export_and_import_round_trip(model: Any, policy: str) -> None:
    ids = torch.cat([text(), text(seed=2)])
    cache = read_cache(model, policy, ids)
    budget = None if policy == "full" else 24
    back = LarderCache.from_dynamic_cache(model, cache.to_dynamic_cache(), policy, budget)
    assert (back.get_seq_length(), back.batch_size) == (50, 2)
    for one, other in zip(back.sequences, cache.sequences, strict=True):
        for layer in one.spec.managed:
            mine, theirs = one.entries(layer.index), other.entries(layer.index)
            assert torch.equal(mine.pack(mine.keys), theirs.pack(theirs.keys))
            assert torch.equal(mine.packed_positions(), theirs.packed_positions())
    later = torch.cat([text(9, seed=3), text(9, seed=4)])
    got = model(later, past_key_values=back).logits
    torch.testing.assert_close(got, model(later, past_key_values=cache).logits, atol=1e-4, rtol=0)
    for one, other in zip(back.sequences, cache.sequences, strict=True):
        assert_same_entries(one, other)


@torch.no_grad()
def test_tokens_appended_by_the_model_keep_their_positions(llama: Any) -> None:
    """Read, exported, continued by the model, reordered, and taken back."""
    cache = read_cache(llama, SNAPKV, torch.cat([text(), text(seed=2)]))
    exported = cache.to_dynamic_cache()
    llama(torch.cat([text(3, seed=5), text(3, seed=6)]), past_key_values=exported)
    exported.reorder_cache(torch.tensor([1, 0]))
    exported.batch_repeat_interleave(2)
    exported.batch_select_indices(torch.tensor([0, 3]))
    exported.crop(-1)
    back = LarderCache.from_dynamic_cache(llama, exported, SNAPKV, 24)
    for one, other in zip(back.sequences, reversed(cache.sequences), strict=True):
        for layer in one.spec.layers:
            mine, theirs = one.entries(layer.index), other.entries(layer.index)
            for head in range(layer.kv_heads):
                expected = [*theirs.head_positions(head).tolist(), 50, 51]
                assert mine.head_positions(head).tolist() == expected


@torch.no_grad()
def test_crop_refused_by_a_later_layer_changes_no_layer(llama: Any) -> None:
    cache = read_cache(llama, "full", text()).sequences[0].fork()
    heads = llama.config.num_key_value_heads
    for layer in (0, 1):
        held = cache.lengths()[layer][0]
        kept = [*range(8), *range(held - 4 - layer, held - layer)]  # layer 1 loses the last token
        plan = torch.tensor([head * held + each for head in range(heads) for each in kept])
        cache.apply(layer, Plan(plan, (len(kept),) * heads))
    exported = dynamic_cache_of([cache], llama.config)
    with pytest.raises(CacheError, match="cannot be cropped"):
        exported.crop(-2)
    assert [layer.keys.shape[2] for layer in exported.layers] == [12, 12]
    llama(text(3, seed=5), past_key_values=exported)
    exported.crop(-3)
    assert [layer.get_seq_length() for layer in exported.layers] == [50, 50]


@torch.no_grad()
def test_crop_reaches_tokens_before_the_export(llama: Any) -> None:
    """Where every head holds their entries; later tokens then have their positions."""
    cache = read_cache(llama, SNAPKV, text())  # protects the last 4
    exported = cache.to_dynamic_cache()
    with pytest.raises(CacheError, match="-?40 tokens cannot be cropped .* before the export"):
        exported.crop(-40)
    exported.crop(-3)
    llama(text(5, seed=5), past_key_values=exported)
    back = LarderCache.from_dynamic_cache(llama, exported, SNAPKV, 24)
    assert back.get_seq_length() == 52
    mine, theirs = back.sequences[0].entries(1), cache.sequences[0].entries(1)
    for head in range(2):
        expected = [*theirs.head_positions(head)[:-3].tolist(), *range(47, 52)]
        assert mine.head_positions(head).tolist() == expected


@torch.no_grad()
def test_imported_model_cache_is_evicted_under_a_policy(llama: Any) -> None:
    own = DynamicCache(config=llama.config)
    llama(text(), past_key_values=own)
    cache = LarderCache.from_dynamic_cache(llama, own, KEYDIFF, 24)
    assert set(cache.lengths()[0]) == {(50, 50)}
    llama(text(16, seed=1), past_key_values=cache)
    assert set(cache.lengths()[0]) == {(24, 24)}


def test_cache_of_an_engine_is_exported(llama: Any) -> None:
    engine = Engine(llama, characters().tokenizer, policy=SNAPKV, budget=24)
    memory = engine.read("The harbour opened in 1871, and its master was called Ida. " * 2)
    exported = dynamic_cache_of([memory.caches.activate(0)], llama.config)
    assert exported.get_seq_length() == memory.figures.context_tokens
    assert exported.layers[0].keys.shape[2] == 24


REFUSED = {
    "heads": ("protect(sinks=2, recent=4) > snapkv(window=4) > pooled()", "padding would be"),
    "layers": ("protect(sinks=2, recent=4) > snapkv(window=4) > pyramid()", "padding would be"),
    "offloaded": (
        "protect(sinks=0, recent=8) > sinks_and_window() > uniform() > park() > flat(page=4)",
        "entries in host memory",
    ),
    "quantized": (f"{SNAPKV} > quantized(bits=4, group=8)", "quantized entries"),
    "positions": (f"{SNAPKV} > compact()", "entries in the form compact"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unexportable_caches_are_refused(llama: Any, case: str) -> None:
    policy, result = REFUSED[case]
    cache = read_cache(llama, policy, text())
    with pytest.raises(CacheError, match=result):
        cache.to_dynamic_cache()


def test_rows_of_different_lengths_are_exported_one_by_one(llama: Any) -> None:
    ids, mask = torch.cat([text(), text(seed=1)]), torch.ones(2, 50, dtype=torch.long)
    mask[1, :10] = 0
    cache = LarderCache(llama, "full")
    with torch.no_grad():
        llama(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(CacheError, match="texts of 50, 40 tokens"):
        cache.to_dynamic_cache()
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.to_dynamic_cache().get_seq_length() == 40


def test_unsupported_caches_are_refused(llama: Any, models: Any) -> None:
    taken = LarderCache.from_dynamic_cache
    with pytest.raises(CacheError, match="A StaticCache cannot be taken over"):
        taken(llama, StaticCache(config=llama.config, max_cache_len=8), "full")
    with pytest.raises(CacheError, match="read one number, at least 1"):
        taken(llama, DynamicCache(config=llama.config), "full")
    with pytest.raises(CacheError, match="nothing can be exported"):
        LarderCache(llama, "full").to_dynamic_cache()
    exported = read_cache(llama, SNAPKV, text()).to_dynamic_cache()
    with pytest.raises(CacheError, match="hold different ones"):
        taken(llama, exported, "full")
    with pytest.raises(CacheError, match="more of an entry than key, value and position"):
        taken(llama, exported, "protect(sinks=2, recent=8) > column_mass() > uniform()", 24)
    exported.layers.pop()
    with pytest.raises(CacheError, match="has 1 layers, but the model has 2"):
        taken(llama, exported, SNAPKV, 24)
