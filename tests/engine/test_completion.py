"""Prompts continued by an engine: as transformers does, in batches, sampled, streamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from larder import Completion, Engine
from larder.core import BadParameter, InputError, UnknownName
from server_core import LIMITED, STEPWISE, characters
from tiny_models import tiny
from type_checking import unchecked

PROMPTS = [
    "The harbour opened in 1871, and its master was called Ida. " * 2,
    "Ann has a dog.",
    "x",
    "Forty boats left on Monday, nine on Tuesday; two came back. " * 3,
]
EPISODIC = (
    'episodes(count=2, embedder="tokens") > blockwise() > protect(sinks=0, recent=8) > '
    "keydiff() > uniform()"
)
# Presets and sentences that evict before, between and while generating, or recall.
PARKED = "protect(sinks=0, recent=8) > sinks_and_window() > uniform() > park() > flat(page=4)"
POLICIES = ["full", LIMITED, STEPWISE, PARKED]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return characters().tokenizer


@torch.no_grad()
def own_completion(module: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Text that transformers' own greedy generation adds to a prompt."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = module.generate(input_ids=ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def engine_under(policy: str, tokenizer: Any, architecture: str = "qwen3") -> Engine:
    budget = None if policy == "full" else 32
    return Engine(tiny(architecture), tokenizer, policy=policy, budget=budget)


@pytest.mark.extended
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_full_cache_completion_equals_transformers(architecture: str, tokenizer: Any) -> None:
    module = tiny(architecture)
    engine = Engine(module, tokenizer, policy="full")
    completions = engine.generate(PROMPTS, max_new_tokens=20)
    expected = [own_completion(module, tokenizer, prompt, 20) for prompt in PROMPTS]
    assert [completion.text for completion in completions] == expected
    assert all(one.kv_bytes >= one.full_kv_bytes * 0.9 for one in completions[:2])


@pytest.mark.extended
@pytest.mark.parametrize("policy", POLICIES)
def test_batched_completions_equal_single_ones(policy: str, tokenizer: Any) -> None:
    engine = engine_under(policy, tokenizer)
    together = engine.generate(PROMPTS, max_new_tokens=18)
    assert together == [engine.generate(prompt, max_new_tokens=18) for prompt in PROMPTS]
    assert [one.prompt for one in together] == PROMPTS
    if policy == LIMITED:
        assert together[0].kv_bytes < together[0].full_kv_bytes / 2


def test_episodic_completion_in_a_batch_equals_a_single_one(tokenizer: Any) -> None:
    engine = engine_under(EPISODIC, tokenizer)
    several = engine.generate([PROMPTS[3], "x"], max_new_tokens=4)
    assert [len(one.ids) for one in several] == [4, 4]
    assert several[0] == engine.generate(PROMPTS[3], max_new_tokens=4)


@pytest.mark.extended
def test_seed_determines_sampling(tokenizer: Any) -> None:
    engine = engine_under("full", tokenizer)
    first = engine.generate(PROMPTS, seed=3, **SAMPLED)
    assert first == engine.generate(PROMPTS, seed=3, **SAMPLED)
    assert first[1] == engine.generate(PROMPTS[1], seed=3, **SAMPLED)
    assert first != engine.generate(PROMPTS, seed=4, **SAMPLED)
    assert first != engine.generate(PROMPTS, max_new_tokens=12)


@pytest.mark.parametrize("policy", ["full", STEPWISE])
def test_streamed_text_equals_the_completion(policy: str, tokenizer: Any) -> None:
    engine = engine_under(policy, tokenizer)
    whole = engine.generate(PROMPTS[0], max_new_tokens=12)
    parts = list(engine.stream(PROMPTS[0], max_new_tokens=12))
    assert "".join(parts) == str(whole) and len(parts) > 4
    stop = whole.text[4:6]
    cut = engine.generate(PROMPTS[0], max_new_tokens=12, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, whole.finish_reason) == ("stop", "length")
    assert "".join(engine.stream(PROMPTS[0], max_new_tokens=12, stop=[stop])) == cut.text


def test_model_is_usable_between_parts_of_a_stream(tokenizer: Any) -> None:
    module = tiny("llama")
    engine = Engine(module, tokenizer, policy="full")
    expected = own_completion(module, tokenizer, PROMPTS[1], 6)
    for _ in engine.stream(PROMPTS[0], max_new_tokens=3):
        assert own_completion(module, tokenizer, PROMPTS[1], 6) == expected


def test_stop_token_ends_one_prompt_of_a_batch(tokenizer: Any) -> None:
    engine = engine_under("full", tokenizer)
    whole = engine.generate(PROMPTS[:2], max_new_tokens=8)
    ending = next(token for token in whole[0].ids if token not in whole[1].ids)
    engine.stop_ids = frozenset({ending})
    short, long = engine.generate(PROMPTS[:2], max_new_tokens=8)
    before = whole[0].ids[: whole[0].ids.index(ending)]
    assert (short.ids, short.finish_reason) == (before, "stop")
    assert long == whole[1]


def test_special_tokens_are_not_duplicated(tokenizer: Any) -> None:
    adapter = Engine(tiny("llama"), tokenizer, policy="full").tokenizer
    assert adapter.encode_prompt("Hi") == tuple(tokenizer("Hi")["input_ids"])
    assert adapter.encode_prompt("<bos>Hi") == (1, *tokenizer("Hi")["input_ids"])


CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "misspelled": ({"temprature": 1}, UnknownName, "Did you mean 'temperature'"),
    "transformers' keyword": ({"do_sample": True}, UnknownName, "temperature=0 takes"),
    "beams": ({"num_beams": 3}, UnknownName, "inside larder.applied"),
    "end tokens": ({"eos_token_id": 3}, UnknownName, r"and stop=\[\.\.\.\] does at a text"),
    "policy": ({"policy": "full"}, UnknownName, r"an argument of Engine\(\.\.\.\)"),
    "OpenAI's keyword": ({"max_tokens": 3}, UnknownName, "give max_new_tokens"),
    "negative": ({"temperature": -0.5}, BadParameter, "temperature must be a finite number"),
    "text": ({"temperature": "hot"}, BadParameter, "temperature must be a number"),
    "top_p": ({"top_p": 0}, BadParameter, r"top_p must be in \(0, 1\]"),
    "top_k": ({"top_k": 1.5}, BadParameter, "top_k must be a whole number"),
    "top_k, a truth value": ({"top_k": True}, BadParameter, "top_k must be a whole number"),
    "seed": ({"seed": True}, BadParameter, "seed must be a whole number, got True"),
    "no tokens": ({"max_new_tokens": 0}, BadParameter, "max_new_tokens must be at least 1"),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_keywords_are_named(case: str, tokenizer: Any) -> None:
    keywords, kind, result = CALLS[case]
    engine = engine_under("full", tokenizer)
    for call in (engine.generate, engine.stream):
        with unchecked(), pytest.raises(kind, match=result):
            call("Hi", **keywords)


def test_invalid_prompts_are_refused(tokenizer: Any) -> None:
    engine = engine_under("full", tokenizer)
    with pytest.raises(InputError, match="Prompt 2 has no tokens"):
        engine.generate(["Hi", ""])
    for call in (engine.read, lambda text: engine.ask(engine.read("Hi."), text), engine.generate):
        with pytest.raises(InputError, match="holds half a surrogate pair"):
            call("half \ud800")
    assert engine.generate([]) == []
    assert isinstance(engine.generate("Hi", max_new_tokens=1), Completion)
