"""Warnings at load about entries that a policy holds beyond its budget."""

from __future__ import annotations

import pytest

from larder import Chat, Engine, Policy
from larder.models import LoadedModel
from larder.session import beyond_budget
from server_core import characters

BLOCKS = "blockwise() > protect(sinks=4, recent=8) > sinks_and_window() > uniform()"


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("full", ["unlimited() keeps everything"]),
        ("whole() > snapkv() > uniform()", ["whole() holds a whole context"]),
        (f"{BLOCKS} > park() > dci(dense=2)", ["the first 2 layers keep", "in host memory"]),
        (f"{BLOCKS} > recompute() > every_step()", ["rebuilt from"]),
        (BLOCKS, []),
        (f"{BLOCKS} > every_step()", []),
        (f"{BLOCKS} > quantized(bits=4)", []),
    ],
)
def test_every_exception_is_named(sentence: str, words: list[str]) -> None:
    clauses = beyond_budget(Policy.parse(sentence))
    assert all(any(word in clause for clause in clauses) for word in words)
    assert bool(clauses) == bool(words)


@pytest.fixture(scope="module")
def sliding() -> LoadedModel:
    return characters("gemma3", layers=4)


def test_sliding_window_layers_are_named_beyond_the_budget(sliding: LoadedModel) -> None:
    [clause] = Engine(sliding, policy=BLOCKS, budget="64").beyond_budget
    assert "of 4 layers hold sliding windows" in clause


@pytest.mark.parametrize("sentence", ["full", BLOCKS, "whole() > snapkv() > uniform()"])
def test_model_of_sliding_layers_only_says_policies_change_nothing(sentence: str) -> None:
    sliding = characters("gemma3", layers=1)  # its full layers come later
    [clause] = Engine(sliding, policy=sentence).beyond_budget
    assert clause == "all 1 layers slide: policy and budget change nothing here"


@pytest.mark.extended
def test_text_kinds_are_named_where_default_policies_differ() -> None:
    clauses = Engine.load().beyond_budget
    assert [each for each in clauses if each.startswith("whole()")] == [
        "whole() holds a whole context until all of it is read (text: prompt, document)"
    ]
    assert Chat(Engine.load()).beyond_budget == ()
    assert all("(text:" not in each for each in Engine.load(policy="snapkv").beyond_budget)
