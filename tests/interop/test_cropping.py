"""Columns that are taken back: of texts, behind the end of a row, and by assistants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import larder
from larder.core import CacheError
from larder.interop import LarderCache
from model_runs import some_ids
from tiny_models import tiny

PAD = 0
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
IDS = torch.tensor([some_ids(50, seed=1)]).clamp(min=1)
KEYDIFF = "protect(sinks=2, recent=4) > keydiff() > pooled()", 40


def generated(model: Any, ids: Tensor, new: int, **options: Any) -> Tensor:
    return model.generate(ids, max_new_tokens=new, **GREEDY, **options)


def test_crop_reaches_as_far_as_entries_are_held(model: Any) -> None:
    cache, expected = LarderCache(model, "full"), generated(model, IDS, 6)
    generated(model, IDS, 1, past_key_values=cache)
    slides = any(layer.sliding_window for layer in cache.attachment.decoder.spec.layers)
    cache.crop(-1 if slides else -20)
    assert cache.get_seq_length() == cache.sequences[0].next_position == (49 if slides else 30)
    assert torch.equal(generated(model, IDS, 6, past_key_values=cache), expected)


def test_crop_beyond_evicted_entries_is_refused(llama: Any) -> None:
    cache = LarderCache(llama, "snapkv", 40)  # protects the last 32
    generated(llama, IDS, 1, past_key_values=cache)
    with pytest.raises(CacheError, match="because only the last 3[0-9] have"):
        cache.crop(-41)
    assert cache.get_seq_length() == cache.sequences[0].next_position == 50


def test_crop_of_policies_with_statistics_is_refused(llama: Any) -> None:
    cache = LarderCache(llama, "protect(sinks=2, recent=8) > column_mass() > uniform()", 40)
    generated(llama, IDS, 1, past_key_values=cache)
    with pytest.raises(CacheError, match="only the last 0 have"):
        cache.crop(-1)


def test_ended_row_has_no_tokens_of_the_last_columns(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([some_ids(30, seed=1), some_ids(30, seed=2)])
    end = int(generated(llama, ids, 3)[0, 32])
    monkeypatch.setattr(llama.generation_config, "eos_token_id", end)
    monkeypatch.setattr(llama.generation_config, "pad_token_id", PAD)
    cache = LarderCache(llama, "full")
    llama.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False)
    held = [sequence.next_position for sequence in cache.sequences]
    assert held == [33, 39]
    cache.crop(-3)
    assert [sequence.next_position for sequence in cache.sequences] == [33, 36]
    cache.crop(-4)
    assert [sequence.next_position for sequence in cache.sequences] == [32, 32]


def test_inner_padding_columns_have_no_tokens(llama: Any) -> None:
    mask = torch.ones(2, 50).long()
    mask[1, :10] = mask[1, 35:40] = 0
    cache = LarderCache(llama, "full")
    llama.generate(
        IDS.expand(2, -1), attention_mask=mask, past_key_values=cache, max_new_tokens=3, **GREEDY
    )
    assert [sequence.next_position for sequence in cache.sequences] == [52, 37]
    cache.crop(-20)
    assert [sequence.next_position for sequence in cache.sequences] == [32, 22]


@pytest.mark.parametrize("policy", [("full", None), KEYDIFF])
def test_assisted_generation_under_a_policy_equals_unassisted(
    model: Any, policy: tuple[str, Any]
) -> None:
    """Assisted generation crops a token of the prompt if none of its candidates was right."""
    name = model.config.model_type.removesuffix("_text")
    assistant = tiny(name, seed=1)
    with larder.applied(model, *policy):
        expected = generated(model, IDS, 12)
        with larder.applied(assistant, *policy) as run:
            got = generated(model, IDS, 12, assistant_model=assistant)
    assert got.tolist() == expected.tolist()
    assert run.cache is not None


def test_self_speculative_generation_under_a_policy_equals_plain(llama: Any) -> None:
    with larder.applied(llama, *KEYDIFF):
        expected = generated(llama, IDS, 12)
        assert torch.equal(generated(llama, IDS, 12, assistant_early_exit=1), expected)


@pytest.mark.parametrize("policy", [("full", None), KEYDIFF])
def test_cache_made_in_inference_mode_can_be_extended(llama: Any, policy: tuple[str, Any]) -> None:
    caches = [LarderCache(llama, *policy), LarderCache(llama, *policy)]
    with torch.inference_mode():
        first = generated(llama, IDS, 4, past_key_values=caches[0])
    assert torch.equal(generated(llama, IDS, 4, past_key_values=caches[1]), first)
    longer = torch.cat([first, torch.tensor([some_ids(9, seed=5)])], 1)
    first, second = (generated(llama, longer, 4, past_key_values=cache) for cache in caches)
    assert torch.equal(first, second)
