"""Docstrings of the public names: complete, and their examples run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import larder
from larder.engine import SamplingParams
from larder.engine import engine as engine_module
from larder.interop import AppliedPolicy
from larder.models import load
from larder.session import ConversationMemory
from server_core import characters
from tiny_models import tiny

ROOT = Path(__file__).parents[1]
TEXT = "Once upon a time a cat was called Minka. " * 6
# What pages of the documentation import from modules, or public functions take and return.
BESIDE = {
    "load": load,
    "SamplingParams": SamplingParams,
    "ConversationMemory": ConversationMemory,
    "AppliedPolicy": AppliedPolicy,
}
KINDS = (classmethod, staticmethod, property)
PARAMETER = re.compile(r"^ {4}(\w+): \S", re.MULTILINE)


def documented() -> Iterator[tuple[str, Any]]:
    """Public names with what has their docstring: names of `larder`, and members of classes."""
    public = {name: getattr(larder, name) for name in sorted(larder.__all__)} | BESIDE
    for name, value in public.items():
        yield name, value
        for key, member in vars(value).items() if inspect.isclass(value) else ():
            function = (
                member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            )
            if not key.startswith("_") and (inspect.isfunction(function) or type(member) in KINDS):
                yield f"{name}.{key}", function


DOCUMENTED = dict(documented())
CALLABLES = {name: value for name, value in DOCUMENTED.items() if not isinstance(value, property)}


def missing_parts(name: str, value: Any) -> list[str]:
    """Parts that a docstring lacks, by the signature of what it describes."""
    text = inspect.getdoc(value) or ""
    owner, _, member = name.rpartition(".")
    is_of_transformers = owner == "LarderCache" and hasattr(transformers.Cache, member)
    if is_of_transformers or isinstance(value, property):
        return [] if text else ["a text"]
    if inspect.isclass(value) and issubclass(value, Exception):
        return missing_sections(text, "Examples")
    parameters = [
        each for each in inspect.signature(value).parameters if each not in ("self", "cls")
    ]
    described = PARAMETER.findall(section(text, "Args"))
    absent = [f"Args: {each}" for each in parameters if each not in described]
    absent += [f"Args: no {each} in the signature" for each in described if each not in parameters]
    has_result = inspect.isfunction(value) and value.__annotations__["return"] != "None"
    has_result &= not inspect.isgeneratorfunction(inspect.unwrap(value))
    needed = ["Returns"] if has_result else []
    if name != "LarderCache.run":
        needed.append("Examples")
    return absent + missing_sections(text, *needed)


def missing_sections(text: str, *names: str) -> list[str]:
    return [name for name in names if not section(text, name)]


def section(text: str, name: str) -> str:
    """Indented lines below a heading; empty without it."""
    found = re.search(rf"^{name}:\n((?: +.*\n?|\n)*)", text, re.MULTILINE)
    return found.group(1) if found else ""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_is_complete(name: str) -> None:
    assert not missing_parts(name, DOCUMENTED[name])


def test_missing_parts_are_found() -> None:
    def partial(first: int, second: int) -> int:
        """Sum.

        Args:
            first: a number.
            third: a number.
        """
        return first + second

    absent = missing_parts("partial", partial)
    assert absent == ["Args: second", "Args: no third in the signature", "Returns", "Examples"]


class ShownOutputChecker(doctest.OutputChecker):
    """Checker that compares what an example shows, and lets examples that show nothing pass."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture(scope="module")
def tiny_model() -> tuple[Any, Any]:
    return tiny("llama"), characters().tokenizer


@pytest.fixture
def names(tiny_model: tuple[Any, Any]) -> dict[str, Any]:
    """Names that examples may use beside the public ones: a model, an engine and their results."""
    model, tokenizer = tiny_model
    engine = larder.Engine(model, tokenizer, policy="kvzip", budget=256)
    chat = larder.Chat(engine.under("streaming_llm", 256))
    chat.say("My cat is called Minka.", max_new_tokens=2)
    cache = larder.LarderCache(model, policy="streaming_llm", budget=64)
    inputs = tokenizer(TEXT, return_tensors="pt")
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2)
    return {
        **{name: getattr(larder, name) for name in larder.__all__},
        **BESIDE,
        "larder": larder,
        "torch": torch,
        "model": model,
        "tokenizer": tokenizer,
        "inputs": inputs,
        "text": TEXT,
        "engine": engine,
        "memory": engine.read(TEXT),
        "chat": chat,
        "cache": cache,
        "exported": cache.to_dynamic_cache(),
    }


def run_example(name: str, text: str, names: dict[str, Any]) -> doctest.TestResults:
    """Run the examples of a docstring; what fails is printed."""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    return doctest.DocTestRunner(ShownOutputChecker()).run(test)


@pytest.mark.parametrize(
    "name", [name for name, value in CALLABLES.items() if ">>>" in (value.__doc__ or "")]
)
@pytest.mark.usefixtures("measured_once")
def test_example_runs(
    name: str, names: dict[str, Any], seed_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the root of the repository; every model that is loaded by name is the bundled one."""
    monkeypatch.setattr(engine_module, "load", lambda *_, **__: seed_model)
    monkeypatch.chdir(ROOT)
    result = run_example(name, CALLABLES[name].__doc__ or "", names)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("text", [">>> 1 + 1\n3\n", ">>> undefined\n"])
def test_wrong_example_fails(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_example("wrong", text, {}).failed == 1
    assert "Failed example" in capsys.readouterr().out
