"""Policy that acts where none is named: by the kind of text, in Python and on the command line."""

from __future__ import annotations

import pytest

import larder
from larder import Chat, Engine, LarderCache, Policy
from larder.cli.options import ModelOptions
from larder.cli.question_run import choose_policy
from larder.core import UnknownName
from larder.session import TextKind, conversation_of, with_measured_recall
from tiny_models import tiny

TEXT = "My cat is called Minka. " * 40
MESSAGES = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Nice."}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load()


def default(kind: str) -> Policy:
    return Policy.parse(larder.default_policy(kind))


@pytest.mark.extended
def test_default_policy_depends_on_the_text_kind(engine: Engine) -> None:
    read = {
        "document": engine.read(TEXT),
        "conversation": engine.read(MESSAGES),
        "contexts": engine.read(contexts=[TEXT, "The dog is called Biscuit."]),
    }
    for kind, memory in read.items():
        assert type(memory.policy.session) is type(default(kind).session)
        assert memory.policy.scorer == default(kind).scorer, kind
    assert engine._completer._policy == default("prompt")
    assert Chat(engine).policy.scorer == default("conversation").scorer
    assert "by what is read" in repr(engine)


def test_contexts_with_a_budget_are_read_as_a_document(engine: Engine) -> None:
    sized = Engine(engine.loaded, budget=96)
    memory = sized.read(contexts=[TEXT, "The dog is called Biscuit."])
    assert memory.policy.scorer == default("document").scorer


def test_explicit_policy_is_used_for_every_kind(engine: Engine) -> None:
    other = engine.under("keydiff", 96)
    for kind in TextKind:
        assert other.policy_for(kind) == with_measured_recall(
            Policy.parse("keydiff"), engine.loaded.decoder.spec
        )


def test_prompts_inside_transformers_have_the_policy_of_prompts() -> None:
    model = tiny("llama")
    assert LarderCache(model).policy == default("prompt")
    with larder.applied(model) as run:
        model.generate(max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert run.cache is not None
    assert run.cache.policy.scorer == default("prompt").scorer


@pytest.mark.parametrize("kind", ["document", "conversation", "contexts"])
def test_command_line_and_engine_have_the_same_defaults(kind: str) -> None:
    given = {
        "document": conversation_of(TEXT),
        "conversation": conversation_of(MESSAGES),
        "contexts": conversation_of(None, [TEXT, TEXT]),
    }
    options = choose_policy(ModelOptions(), [given[kind]])
    assert options.policy == larder.default_policy(kind)


def test_unknown_kind_lists_the_known() -> None:
    with pytest.raises(UnknownName, match="Known: prompt, document, conversation, contexts"):
        larder.default_policy("text")
