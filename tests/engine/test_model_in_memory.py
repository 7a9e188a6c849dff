"""Engines around models that a program holds: same answers as transformers, models unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from larder import Engine
from larder.core import BadParameter, ModelError
from server_core import characters
from tiny_models import VOCABULARY, tiny

ARCHITECTURES = ("llama", "qwen3", "gemma3")
TEXT = "The harbour opened in 1871, and its master was called Ida. "
RECOMPUTED = "whole() > keydiff() > uniform() > recompute(depth=1)"
SHAPE: dict[str, Any] = {"vocab_size": 128, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return characters().tokenizer


@torch.no_grad()
def own_tokens(module: Any, text: str, tokenizer: Any, tokens: int = 16) -> list[int]:
    """Tokens that transformers' own greedy generation adds to a text, without the stop token."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    out = module.generate(input_ids=ids, max_new_tokens=tokens, do_sample=False)
    return [token for token in out[0, ids.shape[1] :].tolist() if token != 2]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("policy", ["keydiff", "h2o", RECOMPUTED])
def test_model_is_unchanged_between_calls(architecture: str, policy: str, tokenizer: Any) -> None:
    module = tiny(architecture)
    config, former = module.config, module.config._attn_implementation
    weights = {name: tensor.data_ptr() for name, tensor in module.named_parameters()}
    before = own_tokens(module, TEXT, tokenizer)
    engine = Engine(module, tokenizer, policy=policy, budget=48)
    assert own_tokens(module, TEXT, tokenizer) == before
    memory = engine.read(TEXT * 3)
    assert engine.ask(memory, "Who?", max_new_tokens=4).ids
    assert own_tokens(module, TEXT, tokenizer) == before
    assert module.config is config and config._attn_implementation == former
    assert {name: tensor.data_ptr() for name, tensor in module.named_parameters()} == weights


def test_two_engines_share_a_model(tokenizer: Any) -> None:
    module = tiny("qwen3")
    one = Engine(module, tokenizer, policy="full")
    other = Engine(module, tokenizer, policy="keydiff", budget=64)
    alone = Engine(tiny("qwen3"), tokenizer, policy="keydiff", budget=64)
    memories = [engine.read(TEXT * 4) for engine in (one, other, alone)]
    answers = [
        engine.ask(memory, "Who?", max_new_tokens=6).ids
        for engine, memory in zip((one, other, alone), memories, strict=True)
    ]
    assert answers[1] == answers[2]
    assert memories[0].figures.kv_bytes > memories[1].figures.kv_bytes


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_peft_model_is_computed_with_its_adapter(tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(tiny("llama"), config).eval()
    before = own_tokens(adapted, TEXT, tokenizer)
    engine = Engine(adapted, tokenizer, policy="full")
    plain = Engine(tiny("llama"), tokenizer, policy="full")
    asked = [e.ask(e.read(TEXT), "Who?", max_new_tokens=8).ids for e in (engine, plain)]
    assert asked[0] != asked[1]
    assert own_tokens(adapted, TEXT, tokenizer) == before
    soft = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ModelError, match="PROMPT_TUNING.*such as LoRA"):
        Engine(peft.get_peft_model(tiny("llama"), soft).eval(), tokenizer)


def encoder_decoder() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**SHAPE)).eval()


def in_place_compiled() -> nn.Module:
    module = tiny("llama")
    module.compile(backend="eager")
    return module


REFUSED = {
    "another module": (lambda: nn.Linear(2, 2), "not a model of transformers"),
    "no head": (lambda: tiny("llama").model, "load it with a language-model head"),
    "encoder-decoder": (encoder_decoder, "encoder with a decoder.*decoder-only"),
    "training": (lambda: tiny("llama").train(), r"call model\.eval\(\) first"),
    "compiled": (lambda: torch.compile(tiny("llama"), backend="eager"), "before torch.compile"),
    "compiled in place": (in_place_compiled, "before torch.compile"),
    "no weights": (lambda: tiny("llama").to("meta"), "device_map="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused(case: str, tokenizer: Any) -> None:
    make, result = REFUSED[case]
    with pytest.raises(ModelError, match=result):
        Engine(make(), tokenizer)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "training": (lambda module: module.train(), r"call model\.eval\(\) first"),
    "dtype": (
        lambda module: module.to(torch.bfloat16),
        "torch.bfloat16 on cpu, but its caches were specified for torch.float32 on cpu",
    ),
    "device": (lambda module: module.to("meta"), "torch.float32 on meta, but"),
    "compiled in place": (lambda module: module.compile(backend="eager"), "before torch.compile"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_modified_model_is_detected(case: str, tokenizer: Any) -> None:
    change, expected = CHANGES[case]
    module = tiny("llama")
    engine = Engine(module, tokenizer, policy="keydiff", budget=48)
    memory = engine.read(TEXT * 2)
    before = memory.caches.activate(0).state()
    change(module)
    with pytest.raises(ModelError, match=expected):
        engine.ask(memory, "Who?", max_new_tokens=4)
    with pytest.raises(ModelError, match=expected):
        engine.generate(TEXT, max_new_tokens=4)
    after = memory.caches.activate(0).state()
    assert all(torch.equal(before[name], own) for name, own in after.items())


def test_missing_or_wrong_tokenizer_is_refused(tokenizer: Any) -> None:
    with pytest.raises(BadParameter, match=r"as by transformers.AutoTokenizer.*, got None"):
        Engine(tiny("llama"))
    with pytest.raises(BadParameter, match=r"got 'full' \(str\)"):
        Engine(tiny("llama"), "full")
    larger = tiny("llama")
    larger.resize_token_embeddings(3 * VOCABULARY)
    with pytest.raises(BadParameter, match="128 tokens, but the model's embedding has 384 rows"):
        Engine(larger, tokenizer)
    smaller = tiny("llama")
    smaller.resize_token_embeddings(VOCABULARY - 1)
    with pytest.raises(BadParameter, match="has 127 rows: give the tokenizer that came with"):
        Engine(smaller, tokenizer)


def test_second_argument_of_a_loaded_model_is_refused() -> None:
    with pytest.raises(BadParameter, match=r"Engine\(loaded, policy='full'\)"):
        Engine(characters(), "full")
