"""Answers that match a schema, a pattern or a grammar, and what cannot be enforced."""

from __future__ import annotations

import json
import re
import threading
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel

pytest.importorskip("llguidance", reason="the extra structured is not installed")

from larder import Engine
from larder.core import BadParameter
from larder.engine import (
    ANY_OBJECT,
    Constraint,
    ConstraintCompiler,
    SamplingParams,
    TokenSampler,
    choice_constraint,
    grammar_constraint,
    json_constraint,
    regex_constraint,
    schema_constraint,
)
from larder.engine import constraint as constraint_module
from server_core import LIMITED, byte_characters, characters

V, END = 128, 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REFUSED: list[dict[str, Any]] = [
    {"type": "object", "not": {"required": ["a"]}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "string", "format": "frob"},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"type": "string", "pattern": "(?=a)b"},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
]


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(byte_characters().tokenizer, V, frozenset({END}))


def sampled(compiler: ConstraintCompiler, constraint: Constraint, seed: int) -> str:
    """An answer of random logits; it ends with the stop token or where nothing may follow."""
    source, ids = torch.Generator().manual_seed(seed), list[int]()
    params = SamplingParams(temperature=1.0, seed=seed)
    sampler = TokenSampler(params, [], compiler.matcher(constraint))
    while not sampler.is_complete and len(ids) < 400:
        logits = torch.randn(V, generator=source)
        logits[[ord('"'), ord("}"), END]] += 4  # so that it ends
        if (token := sampler.sample(logits, ids)) == END:
            break
        ids.append(token)
    assert len(ids) < 400
    return "".join(map(chr, ids))


def test_random_answers_match_their_schema(compiler: ConstraintCompiler) -> None:
    texts = {sampled(compiler, json_constraint(PERSON), seed) for seed in range(12)}
    for text in texts:
        found = json.loads(text)
        assert isinstance(found["age"], int) and len(found["name"]) <= 6
        assert set(found) == {"name", "age"} and ": " not in text.replace(found["name"], "")
    assert len(texts) > 6


def test_random_answers_match_their_pattern_choice_and_grammar(
    compiler: ConstraintCompiler,
) -> None:
    choices = ["yes", 'no "way"', "yesterday"]
    for seed in range(12):
        assert re.fullmatch(
            "[a-c]{2,4}-[0-9]", sampled(compiler, regex_constraint("[a-c]{2,4}-[0-9]"), seed)
        )
        assert sampled(compiler, choice_constraint(choices), seed) in choices
        lark = 'start: "(" start ")" | "x"'
        assert re.fullmatch(r"\(*x\)*", sampled(compiler, grammar_constraint(lark), seed))
        assert isinstance(json.loads(sampled(compiler, json_constraint(ANY_OBJECT), seed)), dict)


def test_nothing_follows_a_closed_object(compiler: ConstraintCompiler) -> None:
    matcher = compiler.matcher(json_constraint({"type": "object", "additionalProperties": False}))
    logits = torch.zeros(V)
    assert torch.isfinite(matcher.masked(logits)).nonzero().flatten().tolist() == [ord("{")]
    for sign in "{}":
        assert not matcher.is_complete
        matcher.accept(ord(sign))
    assert matcher.is_complete and torch.equal(logits, torch.zeros(V))


@pytest.mark.parametrize("schema", REFUSED, ids=str)
def test_unenforceable_schemas_are_refused_unless_lenient(schema: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match="cannot be enforced"):
        json_constraint(schema)
    if "pattern" not in schema:
        assert json_constraint(schema, lenient=True).warnings


def test_trivial_property_names_are_ignored() -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}}
    assert json_constraint(record) == json_constraint({"type": "object"})
    named = {"type": "object", "properties": {"propertyNames": {"type": "string"}}}
    listed = {"enum": [{"propertyNames": {"type": "string"}}]}
    for schema in (named, listed):
        assert "propertyNames" in json_constraint(schema).grammar


def test_pydantic_schema_allows_no_other_fields(compiler: ConstraintCompiler) -> None:
    matcher = compiler.matcher(schema_constraint(Home))
    for sign in '{"town":"Bern","known":true':
        matcher.accept(ord(sign))
    assert torch.isfinite(matcher.masked(torch.zeros(V))).nonzero().flatten().tolist() == [ord("}")]


def test_hostile_grammars_are_refused(compiler: ConstraintCompiler) -> None:
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(500):
        nested = {"type": "array", "items": nested}
    hostile = [
        lambda: json_constraint(nested),
        lambda: regex_constraint("(a{1,1000}){1,1000}b" * 20),
        lambda: regex_constraint("a" * (1 << 19)),
        lambda: choice_constraint([]),
        lambda: grammar_constraint("start: missing"),
    ]
    refused = 0
    for make in hostile:
        try:
            compiler.matcher(make())
        except BadParameter:
            refused += 1
    assert refused >= 4


def test_grammar_is_compiled_once(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, compiled = list[str](), ConstraintCompiler._compiled

    def counted(self: ConstraintCompiler, constraint: Constraint) -> Any:
        calls.append(constraint.digest)
        return compiled(self, constraint)

    monkeypatch.setattr(ConstraintCompiler, "_compiled", counted)
    monkeypatch.setattr(constraint_module, "CACHED_GRAMMARS", 2)
    fresh = ConstraintCompiler(byte_characters().tokenizer, V, frozenset({END}))
    one, two, three = (choice_constraint([text]) for text in ("one", "two", "three"))
    first = fresh.matcher(one)
    first.accept(ord("o"))
    assert torch.isfinite(fresh.matcher(one).masked(torch.zeros(V)))[ord("o")]  # a copy
    for constraint in (two, one, three, one, two):
        fresh.matcher(constraint)
    assert calls == [one.digest, two.digest, three.digest, two.digest]


def test_cached_grammar_does_not_wait_for_a_compilation(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's thread takes a matcher that is cached while another thread compiles."""
    known, new = regex_constraint("known"), regex_constraint("new")
    compiler.matcher(known)
    is_compiling, may_end, compile_ = threading.Event(), threading.Event(), compiler._compiled
    compiled = list[str]()

    def slow(constraint: Constraint) -> Any:
        is_compiling.set()
        assert may_end.wait(30)
        compiled.append(constraint.digest)
        return compile_(constraint)

    monkeypatch.setattr(compiler, "_compiled", slow)
    threads = [threading.Thread(target=compiler.matcher, args=(new,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert is_compiling.wait(30)
    assert not compiler.matcher(known).is_complete
    may_end.set()
    for thread in threads:
        thread.join()
    assert compiled == [new.digest]


def test_tokenizer_without_byte_tokens_is_refused() -> None:
    compiler = ConstraintCompiler(characters().tokenizer, V, frozenset({END}))
    with pytest.raises(BadParameter, match="tokenizer of this model"):
        compiler.matcher(choice_constraint(["a"]))


class Home(BaseModel):
    """Where somebody lives."""

    town: Literal["Bern", "Rome"]
    known: bool


@pytest.mark.parametrize("policy", ["full", LIMITED])
def test_engine_answers_match_the_schema(policy: str) -> None:
    budget = None if policy == "full" else 64
    engine = Engine(byte_characters(), policy=policy, budget=budget)
    memory = engine.read("Ann lives in Rome. " * 6)
    one, two = engine.ask(memory, ["Where?", "Really?"], max_new_tokens=64, schema=Home)
    assert all(Home.model_validate_json(answer.text) for answer in (one, two))
    as_json = engine.ask(memory, "Where?", max_new_tokens=64, schema=Home.model_json_schema())
    assert as_json.text == one.text
    assert engine.ask(memory, "Where?", max_new_tokens=3, schema=Home).new_tokens == 3
    with pytest.raises(BadParameter, match="pydantic"):
        engine.ask(memory, "Where?", schema=int)
