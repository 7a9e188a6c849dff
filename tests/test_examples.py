"""The examples of the README, of the documentation and of examples/ run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import larder
from interop.fake_presses import MaskingPress, QueryPress
from larder import Policy
from larder.engine import engine
from larder.models import loader
from server_core import characters
from tiny_models import tiny

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


SAID = {"ask.py": "Biscuit"}


pytestmark = pytest.mark.usefixtures("measured_once")


@pytest.mark.extended
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.strip() and SAID.get(name, "") in shown


def test_expected_outputs_name_existing_examples() -> None:
    assert SAID.keys() <= {*EXAMPLES}


@pytest.mark.extended
def test_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python, from the root of the repository, where its commands run too."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(compile(first, "README.md", "exec"), names := {"__name__": "__main__"})
    assert "Biscuit" in capsys.readouterr().out
    names |= {"model": tiny("llama"), "tokenizer": characters().tokenizer}
    for code in others:
        exec(compile(code, "README.md", "exec"), names)
        assert capsys.readouterr().out.strip()


PAGES = ("contexts", "tutorial", "how_to/compare_methods", "how_to/add_a_scorer")


@pytest.mark.extended
@pytest.mark.parametrize("page", PAGES)
def test_page_of_the_documentation_runs(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python, from the root of the repository, on the bundled model whatever it names."""
    named = loader.load

    def load_bundled(name: str = "seed", *indices: Any, **options: Any) -> loader.LoadedModel:
        del name
        return named("seed", *indices, **options)

    for module in (loader, engine):
        monkeypatch.setattr(module, "load", load_bundled)
    monkeypatch.chdir(ROOT)
    names = {"__name__": "__main__"}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)
    assert blocks
    for code in blocks:
        exec(compile(code, page, "exec"), names)
        assert capsys.readouterr().out.strip()


def python_of(page: str) -> list[str]:
    """Python blocks of a page of docs/."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_page_of_engine_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"model": tiny("llama"), "tokenizer": characters().tokenizer}
    (code,) = python_of("python")
    exec(compile(code, "python.md", "exec"), names)
    assert "length" in capsys.readouterr().out


@pytest.mark.extended
def test_page_of_generate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its block of images, which tests/interop/test_images.py has on every family."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: tiny("llama"))
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda name, **options: characters().tokenizer
    )
    text, images, exported = python_of("generate")
    assert "processor" in images
    text = text.replace("A long text ...", "A long text, longer than what is always kept. " * 20)
    exec(compile(text, "generate.md", "exec"), names := dict[str, Any]())
    read = names["model"].generate(**names["inputs"], max_new_tokens=100)
    names["longer_inputs"] = {"input_ids": read, "attention_mask": torch.ones_like(read)}
    exec(compile(exported, "generate.md", "exec"), names)
    (layers,) = names["cache"].lengths()
    assert max(map(max, layers)) == names["exported"].layers[0].keys.shape[2] < read.shape[1]


@pytest.mark.extended
def test_page_of_kvpress_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With presses that have the interface of kvpress, which need not be installed."""
    package = ModuleType("kvpress")
    package.SnapKVPress = QueryPress  # pyright: ignore
    package.AdaKVPress = MaskingPress  # pyright: ignore
    monkeypatch.setitem(sys.modules, "kvpress", package)
    model, ids = tiny("llama"), torch.arange(3, 83)[None]
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    monkeypatch.setattr(model.generation_config, "pad_token_id", 0)
    names: dict[str, Any] = {"larder": larder, "torch": torch, "model": model}
    names["inputs"] = names["context"] = {"input_ids": ids}
    names["context_and_question"] = {"input_ids": torch.cat([ids, ids[:, :5]], 1)}
    one_line, own_cache = python_of("from_kvpress")
    exec(compile(one_line, "from_kvpress.md", "exec"), names)
    kept = names["run"].cache.lengths()[0]
    assert len({length for layer in kept for length in layer}) > 1  # freed head by head
    exec(compile(own_cache, "from_kvpress.md", "exec"), names)
    assert names["out"].shape == (1, 185)
    assert max(map(max, names["cache"].lengths()[0])) < 80  # the question went to a copy


def test_press_equivalents_are_valid_policies() -> None:
    text = (ROOT / "docs/from_kvpress.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    found = [row[2].strip("`") for row in rows if len(row) == 4 and row[2].startswith("`")]
    assert len(found) > 20
    for sentence in found:
        assert str(Policy.parse(sentence))
