"""Size of a LarderCache beside that of transformers' own cache, and how caches are printed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import larder
from larder import LarderCache
from model_runs import some_ids

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PADDING = 7


def a_batch() -> dict[str, torch.Tensor]:
    """Two rows, the second with padding on the left."""
    ids = torch.tensor([some_ids(60), some_ids(60, seed=1)])
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return {"input_ids": ids, "attention_mask": mask}


def held_by(cache: DynamicCache) -> int:
    """Bytes of all tensors of a cache of transformers, counted one by one."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("new", [1, 5])
def test_full_size_equals_transformers(model: Any, new: int) -> None:
    call = {**a_batch(), **GREEDY, "max_new_tokens": new}
    own = model.generate(**call, return_dict_in_generate=True).past_key_values
    cache = LarderCache(model, "snapkv", 40)
    model.generate(**call, past_key_values=cache)
    assert cache.full_nbytes == held_by(own)


def test_empty_cache_has_no_size(llama: Any) -> None:
    cache = LarderCache(llama, "snapkv", 40)
    assert (cache.nbytes, cache.full_nbytes) == (0, 0)


def test_repr_is_short(llama: Any) -> None:
    with larder.applied(llama, "h2o > prefill_only()", 40) as run:
        assert repr(run) == "AppliedPolicy(cache=None)"
        llama.generate(**a_batch(), **GREEDY, max_new_tokens=2)
    cache = run.cache
    assert cache is not None
    counts = [count for row in cache.lengths() for layer in row for count in layer]
    mean = round(sum(counts) / len(counts))
    assert 20 < mean <= 41
    assert repr(cache) == (
        "LarderCache('whole() > protect(sinks=0, recent=0.5) > column_mass() > uniform(tokens=40)',"
        f" rows=2, columns=61, entries_per_head={mean}, nbytes={cache.nbytes},"
        f" full_nbytes={cache.full_nbytes})"
    )
    assert repr(run) == f"AppliedPolicy(cache={cache!r})"
