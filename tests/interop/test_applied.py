"""Blocks of `larder.applied`: entered again, nested, left in any order, and left by an error."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

import larder
from larder.core import BadParameter, BudgetError, CacheError, ModelError, UnknownName, UsageError
from model_runs import some_ids
from tiny_models import tiny
from type_checking import unchecked

IDS = torch.tensor([some_ids(60)])
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _entries(run: Any) -> int:
    """Entries of the first head of the cache of the latest `generate()`."""
    return run.cache.lengths()[0][0][0]


def _generate(model: Any) -> list[int]:
    return model.generate(IDS, max_new_tokens=2, **GREEDY)[0].tolist()


def test_context_manager_is_reusable(llama: Any) -> None:
    context = larder.applied(llama, "keydiff", 40)
    counts: list[int] = []
    for _ in range(2):
        with context as run:
            _generate(llama)
            counts.append(_entries(run))
    assert counts == [41, 41]
    with pytest.raises(UsageError, match="was not entered"):
        context.__exit__(None, None, None)


def test_inner_block_takes_precedence(llama: Any) -> None:
    outer = larder.applied(llama, "keydiff", 40)
    with outer as first:
        with outer as second:
            _generate(llama)
        assert first.cache is None and second.cache is not None
        _generate(llama)
        assert first.cache is not None


def test_blocks_are_exited_in_any_order(llama: Any) -> None:
    first, second = larder.applied(llama, "keydiff", 40), larder.applied(llama, "keydiff", 50)
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    _generate(llama)
    assert one.cache is None and _entries(two) == 51
    second.__exit__(None, None, None)
    former = two.cache
    _generate(llama)
    assert one.cache is None and two.cache is former  # the model's own attention


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_ends_the_block(llama: Any, error: type[BaseException]) -> None:
    with pytest.raises(error), larder.applied(llama, "keydiff", 40) as run:
        raise error
    _generate(llama)
    assert run.cache is None


def test_decorated_function_gets_a_cache_per_call(llama: Any) -> None:
    caches: list[Any] = []

    @larder.applied(llama, "keydiff", 40)
    def generated() -> list[int]:
        out = llama.generate(IDS, max_new_tokens=2, return_dict_in_generate=True, **GREEDY)
        caches.append(out.past_key_values)
        return out.sequences[0].tolist()

    assert generated() == generated()
    assert [cache.lengths()[0][0][0] for cache in caches] == [41, 41]


def test_fractional_budget_of_a_short_row_names_its_length(llama: Any) -> None:
    with pytest.raises(BudgetError, match=r"first text has 60 tokens .* prefill_chunk_size"):
        with larder.applied(llama, "keydiff", "25%"):
            _generate(llama)


def test_empty_prompt_is_refused(llama: Any) -> None:
    with pytest.raises(CacheError, match="the prompt is empty"), larder.applied(llama, "keydiff"):
        llama.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2, **GREEDY)


def test_cache_is_not_pickled_but_copied(llama: Any) -> None:
    cache = larder.LarderCache(llama, "keydiff", 40)
    llama.generate(IDS, past_key_values=cache, max_new_tokens=2, **GREEDY)
    with pytest.raises(UsageError, match=r"to_dynamic_cache\(\)"):
        pickle.dumps(cache)
    assert copy.copy(cache).lengths() == cache.lengths()


def test_double_precision_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"computes in torch\.float64.*float32, float16, bfloat16"):
        larder.LarderCache(tiny("llama").double(), "keydiff")


def test_model_with_a_separate_embedding_module_generates_the_same() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=16, vocab_size=128, is_decoder=True)
    torch.manual_seed(0)
    model = BertLMHeadModel(config).eval()
    own = _generate(model)
    with larder.applied(model, "full"):
        assert _generate(model) == own


class _Press:
    """Any object that is no policy."""


def test_press_in_place_of_a_policy_names_the_argument(llama: Any) -> None:
    press: Any = _Press()
    with unchecked(), pytest.raises(BadParameter, match="kvpress=press"):
        larder.applied(llama, press).__enter__()
    with pytest.raises(UsageError, match="is a text: give the object"):
        larder.applied(llama, kvpress="SnapKVPress(0.5)").__enter__()
    with pytest.raises(UnknownName, match=r"larder\.applied\(model, kvpress=press\)"):
        larder.Engine(llama, kvpress=_Press())  # pyright: ignore[reportCallIssue]
