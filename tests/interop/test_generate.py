"""`model.generate` over a LarderCache, for one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import pipeline

import larder
from interop.replay import assert_same_entries, decoder_of, replay
from larder.core import UsageError
from larder.interop import LarderCache
from model_runs import some_ids
from server_core import characters

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
POLICIES = {
    "snapkv": "snapkv",
    "keydiff": "blockwise(tokens=16) > protect(sinks=2, recent=4) > keydiff() > pooled()",
    "h2o": "protect(sinks=2, recent=8) > column_mass() > uniform() > every_step()",
    "streaming_llm": "streaming_llm",
}
BUDGET = 40


def prompt(tokens: int = 50, seed: int = 0) -> Tensor:
    return torch.tensor([some_ids(tokens, seed=seed)])


def generated(model: Any, ids: Tensor, new: int, **options: Any) -> list[int]:
    """Generated tokens of one row."""
    out = model.generate(ids, max_new_tokens=new, **{**GREEDY, **options})
    return out[0, ids.shape[1] :].tolist()


def test_full_budget_equals_the_model(model: Any) -> None:
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(prompt(), max_new_tokens=16, **options)
    with larder.applied(model, "full") as run:
        got = model.generate(prompt(), max_new_tokens=16, **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=0)
    assert run.cache is not None
    assert got.past_key_values is run.cache


@pytest.mark.parametrize("name", POLICIES)
def test_policy_keeps_the_same_entries_as_the_engine(model: Any, name: str) -> None:
    with larder.applied(model, POLICIES[name], BUDGET) as run:
        new = generated(model, prompt(), 6)
    assert run.cache is not None
    decoder = decoder_of(model.config.model_type.removesuffix("_text"))
    expected = replay(decoder, POLICIES[name], BUDGET, [(prompt()[0].tolist(), new[:-1])])
    assert_same_entries(run.cache.sequences[0], expected.cache)
    assert new[1:] == expected.generated


@pytest.mark.parametrize("name", POLICIES)
def test_second_turn_is_prefilled_like_a_text(llama: Any, name: str) -> None:
    cache, ids = LarderCache(llama, POLICIES[name], BUDGET), prompt()
    first = generated(llama, ids, 4, past_key_values=cache)
    more = torch.cat([ids, torch.tensor([first]), prompt(20, seed=1)], 1)
    second = generated(llama, more, 4, past_key_values=cache)
    turns = [(ids[0].tolist(), first[:-1]), (more[0, 53:].tolist(), second[:-1])]
    expected = replay(decoder_of("llama"), POLICIES[name], BUDGET, turns)
    assert_same_entries(cache.sequences[0], expected.cache)
    assert first[1:] + second[1:] == expected.generated


def test_second_turn_under_a_full_budget_equals_the_model(llama: Any) -> None:
    cache = LarderCache(llama, "full")
    generated(llama, prompt(), 4, past_key_values=cache)
    more = torch.cat([prompt(), prompt(20, seed=1)], 1)[:, :65]
    longer = torch.cat([prompt(), torch.tensor([generated(llama, prompt(), 4)]), more[:, 50:]], 1)
    assert generated(llama, longer, 4, past_key_values=cache) == generated(llama, longer, 4)


def test_memory_equals_the_held_entries(llama: Any) -> None:
    with larder.applied(llama, "protect(sinks=2, recent=8) > keydiff() > pooled()", 100) as run:
        generated(llama, prompt(400), 1)
    assert run.cache is not None
    lengths = run.cache.lengths()[0]
    assert sum(map(sum, lengths)) == 2 * 2 * 100
    assert len({n for heads in lengths for n in heads}) > 1  # budgets differ by head
    needed = sum(map(sum, lengths)) * (2 * 16 * 4 + 4)
    assert needed <= run.cache.nbytes <= 1.02 * needed


def test_calls_without_a_cache_run_the_models_own_attention(llama: Any) -> None:
    config, implementation = llama.config, llama.config._attn_implementation
    expected = llama(prompt()).logits
    with larder.applied(llama, "streaming_llm", BUDGET):
        generated(llama, prompt(), 2)
        with pytest.warns(UserWarning, match="no policy acts"):
            assert torch.equal(llama(prompt()).logits, expected)
        generated(llama, prompt(), 2, use_cache=False)
    assert llama.config is config
    assert config._attn_implementation == implementation
    assert torch.equal(llama(prompt()).logits, expected)


def test_direct_calls_give_all_logits(llama: Any) -> None:
    cache = LarderCache(llama, "full")
    with torch.no_grad():
        first = llama(prompt(), past_key_values=cache).logits
        second = llama(prompt(9, seed=1), past_key_values=cache).logits
        expected = llama(torch.cat([prompt(), prompt(9, seed=1)], 1)).logits
    torch.testing.assert_close(torch.cat([first, second], 1), expected, atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 59


class Recorded:
    """Streamer that records what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def test_pipeline_answers_as_the_model_does(llama: Any) -> None:
    tokenizer = characters().tokenizer
    pipe = pipeline("text-generation", model=llama, tokenizer=tokenizer)
    text = "the cat sat on the mat " * 10
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    expected = pipe(text, **options)
    with larder.applied(llama, "full") as run:
        assert pipe(text, **options) == expected
    assert run.cache is not None and run.cache.nbytes
    with larder.applied(llama, POLICIES["keydiff"], budget=BUDGET) as evicted:
        pipe(text, **options)
    assert evicted.cache is not None and evicted.cache.nbytes < run.cache.nbytes


def test_sampled_and_streamed_tokens_under_a_full_budget_equal_the_model(llama: Any) -> None:
    def sampled() -> tuple[list[int], list[int]]:
        torch.manual_seed(0)
        streamer = Recorded()
        options = {"do_sample": True, "temperature": 2.0, "top_k": 0, "streamer": streamer}
        return generated(llama, prompt(), 8, **options), streamer.tokens[50:]

    expected = sampled()
    with larder.applied(llama, "full"):
        assert sampled() == expected
    assert expected[0] == expected[1]


def test_stop_strings_under_a_full_budget_equal_the_model(llama: Any) -> None:
    """generate() passes the tokenizer that they need on to the layers."""
    tokenizer = characters().tokenizer
    stop = tokenizer.decode(generated(llama, prompt(), 4)[2:])
    options = {"stop_strings": [stop], "tokenizer": tokenizer}
    expected = generated(llama, prompt(), 12, **options)
    with larder.applied(llama, "full"):
        assert generated(llama, prompt(), 12, **options) == expected
    assert len(expected) == 4


def test_copy_continues_on_its_own(llama: Any) -> None:
    cache = LarderCache(llama, POLICIES["h2o"], BUDGET)
    ids = prompt()
    generated(llama, ids, 1, past_key_values=cache)
    copy, held = cache.fork(), cache.lengths()
    longer = torch.cat([ids, prompt(20, seed=1)], 1)
    once = generated(llama, longer, 4, past_key_values=copy)
    assert cache.lengths() == held
    assert cache.get_seq_length() == 50
    assert generated(llama, longer, 4, past_key_values=cache) == once


def test_caches_of_one_model_are_independent(llama: Any) -> None:
    caches = [LarderCache(llama, "full"), LarderCache(llama, POLICIES["h2o"], BUDGET)]
    expected = [generated(llama, prompt(), 4, past_key_values=LarderCache(llama, "full"))]
    generated(llama, prompt(30, seed=2), 4, past_key_values=caches[1])
    assert generated(llama, prompt(), 4, past_key_values=caches[0]) == expected[0]


def test_another_cache_inside_is_refused(llama: Any) -> None:
    with larder.applied(llama, "full"), pytest.raises(UsageError, match="StaticCache"):
        generated(llama, prompt(), 2, cache_implementation="static")


def test_attachment_is_made_once(models: Callable[[str], Any]) -> None:
    model = models("qwen2")
    caches = [LarderCache(model, "full") for _ in range(2)]
    assert caches[0].attachment is caches[1].attachment
    assert len(model._forward_pre_hooks) == 1
