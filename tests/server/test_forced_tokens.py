"""Tokens that a constraint forces, read in one forward batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason="the extra structured is not installed")

from larder import Engine
from larder.engine import (
    ConstraintCompiler,
    SamplingParams,
    TokenSampler,
    choice_constraint,
    json_constraint,
    regex_constraint,
)
from larder.models import LoadedModel
from server_core import LIMITED, POLICIES, STEPWISE, Served, byte_characters, user

LONG = "x" * 20  # more than one pass reads at once
SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"enum": [1, 2]}, LONG: {"type": "boolean"}, "y": {"const": "z"}},
    "required": ["temperature", LONG, "y"],
    "additionalProperties": False,
}
ASKED = [user("How warm is it in here?")]
TOKENS = len(json.dumps({"temperature": 1, LONG: True, "y": "z"}, separators=(",", ":")))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return byte_characters()


@contextmanager
def one_per_pass() -> Iterator[None]:
    """Sampling in which every token is one of a pass of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenSampler, "forced", lambda sampler, vocab_size: [])
        yield


@contextmanager
def counted_passes(loaded: LoadedModel) -> Iterator[list[int]]:
    """Tokens of each pass whose logits are used."""
    counts, forward = list[int](), loaded.decoder.forward_logits

    def counting(rows: Any, *more: Any) -> Any:
        counts.append(sum(len(row.ids) for row in rows))
        return forward(rows, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded.decoder, "forward_logits", counting)
        yield counts


def test_forced_tokens_match_masked_sampling() -> None:
    compiler = ConstraintCompiler(byte_characters().tokenizer, 128, frozenset({2}))
    for make in (lambda: json_constraint(SCHEMA), lambda: regex_constraint("ab[cd]ef")):
        source, params = torch.Generator().manual_seed(1), SamplingParams(temperature=1.0, seed=7)
        samplers = [TokenSampler(params, [], compiler.matcher(make())) for _ in range(2)]
        found = list[int]()
        while not samplers[0].is_complete:
            logits = torch.randn(128, generator=source)
            found.append(samplers[0].sample(logits, found))
            assert samplers[1].sample(logits, found[:-1]) == found[-1]
            for token in samplers[0].forced(len(logits)):  # with as many random numbers
                noise = torch.randn(128, generator=source)
                assert samplers[1].sample(noise, found) == token
                found.append(token)
        assert samplers[1].is_complete


@pytest.mark.extended
@pytest.mark.parametrize(
    ("policy", "temperature"),
    [
        ("full", 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("full", 1.0), ("limited", 1.0), ("stepwise", 0.0))
        ),
    ],
)
def test_server_batches_forced_tokens(loaded: LoadedModel, policy: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5)

    def answers() -> tuple[list[Any], int]:
        served, result = Served(loaded, POLICIES[policy]), list[Any]()
        messages = list(ASKED)
        for constraint in (json_constraint(SCHEMA), choice_constraint(["no way", "yes"]), None):
            answer = served.ask(
                messages,
                session="talk",
                constraint=constraint,
                max_new_tokens=TOKENS + 9,
                sampling=sampling,
            )
            messages = [*messages, assistant(answer.text), user("And now?")]
            result.append((answer.text, answer.result.reason, answer.result.new_tokens))
        return result, served.core.scheduler.steps

    result, steps = answers()
    with one_per_pass():
        expected, single_steps = answers()
    assert result == expected
    assert json.loads(result[0][0]).keys() == {"temperature", LONG, "y"} and result[1][0] in (
        "no way",
        "yes",
    )
    assert single_steps >= TOKENS
    if policy == "stepwise":  # evicts at every token
        assert steps == single_steps
    else:  # two choices beside tokens of which 16 are read in a pass
        assert steps < single_steps - TOKENS / 2


def test_answer_stops_inside_forced_tokens(loaded: LoadedModel) -> None:
    served = Served(loaded)
    constraint = regex_constraint("[ab]cdefgh")
    whole = served.ask(ASKED, constraint=constraint, max_new_tokens=9)
    assert (whole.result.new_tokens, whole.result.reason) == (7, "stop")
    for stop, most, text, reason in ((("ef",), 9, "cd", "stop"), ((), 3, "cd", "length")):
        answer = served.ask(ASKED, constraint=constraint, stop=stop, max_new_tokens=most)
        assert answer.text[1:] == text and answer.result.reason == reason
        with one_per_pass():
            single = served.ask(ASKED, constraint=constraint, stop=stop, max_new_tokens=most)
        assert (single.text, single.result.new_tokens) == (answer.text, answer.result.new_tokens)
    scored = served.ask(ASKED, constraint=constraint, logprobs=0, max_new_tokens=9)
    assert [each.text for each in scored.logprobs] == list(scored.text)
    exact = served.ask(ASKED, constraint=constraint, max_new_tokens=7)
    assert exact.result.reason == "stop"


@pytest.mark.extended
@pytest.mark.parametrize(
    "policy", ["full", STEPWISE, pytest.param(LIMITED, marks=pytest.mark.slow)]
)
def test_engine_batches_forced_tokens(loaded: LoadedModel, policy: str) -> None:
    budget = None if policy == "full" else 64
    engine = Engine(loaded, policy=policy, budget=budget)
    memory = engine.read("It is warm in here. " * 6)

    def asked(**more: Any) -> tuple[str, int, int]:
        with counted_passes(loaded) as passes:
            answer = engine.ask(memory, "How warm?", schema=SCHEMA, max_new_tokens=90, **more)
        return answer.text, answer.new_tokens, len(passes)

    sampled = SamplingParams(temperature=1.0, seed=3)
    for more in ({}, {"sampling": sampled}):
        *found, passes = asked(**more)
        with one_per_pass():
            *expected, single = asked(**more)
        assert found == expected == [found[0], TOKENS + ("false" in found[0])]
        assert single == found[1]
        assert passes == (single if policy == STEPWISE else 3), "one before each choice"


def assistant(text: str) -> Any:
    from larder.server import ChatMessage

    return ChatMessage("assistant", text)
