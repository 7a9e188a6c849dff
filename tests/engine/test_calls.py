"""Calls that do not fit a public function, and how public objects are printed."""

from __future__ import annotations

from typing import Any

import pytest

import larder
from larder import Chat, Engine, LarderCache, LarderError, read_conversation
from larder.core import BudgetError, InputError, ModelError, UnknownName, UsageError
from tiny_models import tiny
from type_checking import unchecked

TEXT = "My cat is called Minka. " * 40
RATIO = r"argument 'compression_ratio'.*the budget, 1 - compression_ratio, as in budget=\"25%\""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(policy="keydiff", budget="25%")


@pytest.fixture
def model() -> Any:
    return tiny("llama")


@pytest.mark.parametrize("function", [larder.applied, LarderCache, Engine])
def test_misspelled_keyword_suggests_the_nearest(model: Any, function: Any) -> None:
    name = function.__qualname__
    with (
        unchecked(),
        pytest.raises(UnknownName, match=rf"{name}\(\) has no .*'bugdet'. Did you mean 'budget'"),
    ):
        function(model, bugdet=512)
    with unchecked(), pytest.raises(UnknownName, match=RATIO):
        function(model, compression_ratio=0.5)


def test_unknown_keywords_name_the_supported_ones(engine: Engine) -> None:
    with (
        unchecked(),
        pytest.raises(UnknownName, match=r"Engine\.load\(\) has no .*'torch_dtype': give dtype="),
    ):
        Engine.load("seed", torch_dtype="float32")
    with (
        unchecked(),
        pytest.raises(UnknownName, match=r"'load_in_4bit': load the model with transformers"),
    ):
        Engine.load("seed", load_in_4bit=True)
    with (
        unchecked(),
        pytest.raises(UnknownName, match=r"in Engine\.ask, sampling=SamplingParams\(temperature="),
    ):
        engine.ask(engine.read("A cat sat on a mat. " * 20), "Who?", temperature=0.7)
    with (
        unchecked(),
        pytest.raises(UsageError, match=r"too many.*takes model by position and all .*: policy=,"),
    ):
        Engine.load("seed", "kvzip")
    with (
        unchecked(),
        pytest.raises(UsageError, match=r"LarderCache\(\): missing a required argument: 'model'"),
    ):
        LarderCache()
    with (
        unchecked(),
        pytest.raises(UnknownName, match=r"Engine\.ask\(\) has no .*'max_tokens'. Did you mean"),
    ):
        engine.ask(engine.read(TEXT), "Who?", max_tokens=3)


def test_valid_call_raises_its_own_errors() -> None:
    with unchecked(), pytest.raises(ModelError, match="not a model of transformers"):
        LarderCache("gpt2")


def test_fractional_budget_of_a_short_prompt_names_the_way_out(engine: Engine) -> None:
    with (
        unchecked(),
        pytest.raises(
            BudgetError, match=r"of 1 token is .* short text give it a min, .* a budget in tokens"
        ),
    ):
        list(engine.stream("Hi there", max_new_tokens=2))
    assert engine.under("keydiff", 512).generate("Hi there", max_new_tokens=2).text


def test_policy_that_needs_a_question_names_the_argument(engine: Engine) -> None:
    finch = engine.under("finch", 96)
    with (
        unchecked(),
        pytest.raises(UsageError, match=r"give engine\.read\(text, prompts=\{\"question\""),
    ):
        finch.read(TEXT)
    memory = finch.read(TEXT, prompts={"question": "What is the cat called?"})
    assert memory.figures.kv_bytes < memory.figures.full_kv_bytes
    with (
        unchecked(),
        pytest.raises(LarderError, match=r"prompts must be texts by name, such as \{\"question\""),
    ):
        finch.read(TEXT, prompts="What is the cat called?")


def test_binary_document_names_the_way_out(tmp_path: Any) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(b"%PDF-1.4")
    with (
        unchecked(),
        pytest.raises(InputError, match=r"'\.pdf'.*save its text as report\.txt, and give that"),
    ):
        read_conversation(path)


def test_unknown_model_suggests_the_nearest() -> None:
    with (
        unchecked(),
        pytest.raises(ModelError, match=r"cannot be loaded\. Did you mean 'smollm2'\?"),
    ):
        Engine.load("smolm2")


def test_public_objects_have_one_line_reprs(engine: Engine) -> None:
    memory = engine.read(TEXT)
    answer = engine.ask(memory, "Who?", max_new_tokens=2)
    completion = engine.generate(TEXT, max_new_tokens=2)
    chat = Chat(engine.under("keydiff", 96))
    for printed in (engine, memory, memory.figures, answer, completion, chat, engine.loaded):
        assert len(repr(printed)) < 300, printed
    figures = memory.figures
    assert repr(memory) == (
        f"ConversationMemory('text', policy='{memory.policy.short}', "
        f"tokens={figures.context_tokens}, budget_tokens={figures.budget_tokens}, "
        f"kv_bytes={figures.kv_bytes}, full_kv_bytes={figures.full_kv_bytes})"
    )
    assert repr(engine.policy) == "Policy('blockwise() > keydiff() > uniform()')"
    assert repr(engine).endswith("policy='blockwise() > keydiff() > uniform()', budget='25%')")
    assert repr(memory.conversation) == "Conversation('text', 1 messages, 0 questions)"
