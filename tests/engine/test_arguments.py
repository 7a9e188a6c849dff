"""Arguments of the public classes, and the errors for wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from larder import Chat, Conversation, Engine, LarderError, Message, Policy, read_conversation
from larder.core import BudgetUnit, InputError, MemoryBudget, UsageError
from larder.models import SEED, load, seed_tokenizer
from larder.session import resolve_budget
from tiny_models import tiny
from type_checking import unchecked

FILE = Path("examples/conversation.json")
SHARES = [0.25, "0.25", "1/4", "25%", " 1 / 4 ", "25.0%"]
EQUAL = {
    (1.0, BudgetUnit.SHARE): [1.0, "1.0", "1/1", "100%"],
    (0.25, BudgetUnit.SHARE): SHARES,
    (0.25, BudgetUnit.SHARE, 64): ["25% min 64", "1/4, min 64", "0.25 min64"],
    (512.0, BudgetUnit.TOKENS): [512, "512"],
    (64.0 * (1 << 20), BudgetUnit.BYTES): ["64MiB", "65536KiB", " 64 MiB "],
    (1e6, BudgetUnit.BYTES): ["1MB", "0.001GB"],
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(policy="keydiff", budget=96)


@pytest.mark.parametrize("amount", EQUAL, ids=str)
def test_budget_spellings_are_parsed(amount) -> None:
    assert {MemoryBudget.parse(given) for given in EQUAL[amount]} == {MemoryBudget(*amount)}


NO_BUDGETS = [0, -1, "0", 1.5, "1.5", "5/4", "1/0", "many", "64 apples", "", "25% min", "min 64"]


@pytest.mark.parametrize("given", [*NO_BUDGETS, "512 min 64", "64MiB min 64"])
def test_invalid_budgets_are_refused(given) -> None:
    with pytest.raises(UsageError, match=r"budget .*write 512 .*25%, 1/4 or 0\.25 .*64MiB"):
        MemoryBudget.parse(given)


def test_fractional_budget_spellings_are_equal(engine) -> None:
    spec, policy = engine.loaded.decoder.spec, Policy.parse("keydiff() > uniform()")
    assert {resolve_budget(policy, share, 1000, spec) for share in SHARES} == {250}


def test_fractional_budget_of_a_short_text_is_its_minimum(engine) -> None:
    spec, policy = engine.loaded.decoder.spec, Policy.parse("keydiff() > uniform()")
    held = [resolve_budget(policy, "25% min 64", tokens, spec) for tokens in (1000, 256, 100)]
    assert held == [250, 64, 64]
    amount = MemoryBudget.parse("25% min 64")
    assert (amount.bytes(80_000, 100), amount.bytes(8_000, 100)) == (20_000, 6_400)


def test_budget_numbers_and_strings_are_equal(engine) -> None:
    conversation = read_conversation(FILE)
    held = [
        engine.under("keydiff", budget).read(conversation).figures.budget_tokens
        for budget in (96, "96")
    ]
    assert held == [96, 96]


def test_texts_messages_and_files_are_read(engine) -> None:
    result = "My dog is called Biscuit."
    messages = [{"role": "user", "content": result}, {"role": "assistant", "content": "Nice."}]
    own = Conversation("own", (Message("user", result), Message("assistant", "Nice.")))
    read = engine.read(messages)
    assert read.conversation.messages == own.messages
    assert read.figures.context_tokens == engine.read(own).figures.context_tokens
    assert engine.read(result).conversation.messages[0].content == result
    assert engine.read(FILE).conversation == read_conversation(FILE)


def test_list_of_questions_gets_a_list_of_answers(engine) -> None:
    memory = engine.read([{"role": "user", "content": "My dog is called Biscuit."}])
    asked = ["What is my dog called?", "Who am I?", "What is my dog called?"]
    answers = engine.ask(memory, asked, max_new_tokens=8)
    one = engine.ask(memory, asked[0], max_new_tokens=8)
    assert [answer.question for answer in answers] == asked
    assert answers[0].text == answers[2].text == one.text
    assert engine.ask(memory, []) == []
    with pytest.raises(InputError, match="question is blank"):
        engine.ask(memory, ["Who am I?", " "])


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_torch_dtypes_are_accepted(dtype) -> None:
    assert load(SEED, dtype=dtype).decoder.spec.dtype == torch.bfloat16


def test_dtype_auto_is_that_of_the_weights(tmp_path) -> None:
    tiny("llama").to(torch.float16).save_pretrained(tmp_path)
    seed_tokenizer().save_pretrained(tmp_path)
    assert load(str(tmp_path), dtype="auto").decoder.spec.dtype == torch.float16
    assert load(str(tmp_path)).decoder.spec.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [("", "empty"), ("  \n", "empty"), ("notes/today.txt", "name of a file"), ([], "empty")],
)
def test_empty_input_or_file_name_is_refused(engine, given, message) -> None:
    with pytest.raises(InputError, match=message):
        engine.read(given)


# Each without the type checks of the tests: what users see.
CALLS = {
    "Engine.load(3)": "model must be",
    "Engine.load(policy=3)": "policy must be",
    "Engine.load(budget=[512])": "budget is a list",
    "Engine.load(budget=True)": "budget is a bool",
    "Engine.load(budget='x')": "budget 'x' is not a size",
    "Engine.load(block='64')": "block must be a whole number",
    "Engine.load(block=0)": "block must be at least 1",
    "Engine.load(device=0)": "device must be",
    "Engine.load(dtype='int3')": "dtype must be one of",
    "Engine.load(dtype=torch.int8)": "dtype must be one of",
    "Engine('seed')": "model must be",
    "engine.under(3)": "policy must be",
    "engine.read(3)": "conversation must be",
    "engine.read({'role': 'user'})": "conversation must be",
    "engine.read(['hello'])": "message 1 must be an object",
    "engine.read([{'role': 'user'}])": "message 1 has no 'content'",
    "engine.ask('memory', 'Who?')": "memory must be",
    "engine.ask(memory, 3)": "question must be",
    "engine.ask(memory, ['Who?', 3])": "question must be",
    "engine.ask(memory, 'Who?', 0.7)": "sampling must be",
    "engine.ask(memory, 'Who?', max_new_tokens='8')": "max_new_tokens must be",
    "engine.ask(memory, 'Who?', max_new_tokens=0)": "max_new_tokens must be",
    "engine.ask(memory, 'Who?', stop=5)": "stop must be a string or a list of strings",
    "engine.ask(memory, 'Who?', stop=['a', 5])": "stop must be a string or a list of strings",
    "Chat(3)": "engine must be",
    "Chat(engine).say(3)": "text must be",
    "Chat(engine).say('Hi', max_new_tokens=None)": "max_new_tokens must be",
}


def outcome(call: str, names: dict[str, object]) -> str:
    try:
        return repr(eval(call, names))
    except LarderError as error:
        return str(error)


def test_wrong_type_is_named(engine) -> None:
    engine = engine.under("keydiff", "96")
    memory = engine.read("My dog is called Biscuit.")
    names = {"Chat": Chat, "Engine": Engine, "engine": engine, "memory": memory, "torch": torch}
    with unchecked():
        result = {call: outcome(call, names) for call in CALLS}
    assert {call: message for call, message in result.items() if CALLS[call] not in message} == {}
