"""The examples of the README, of the documentation and of examples/ run as they stand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from larder.engine import engine
from larder.models import loader
from larder.models.tiny import tiny
from server_core import characters

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


SAID = {"ask.py": "Biscuit"}


pytestmark = pytest.mark.usefixtures("measured_once")


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.strip() and SAID.get(name, "") in shown


def test_an_example_asks_for_what_was_said() -> None:
    assert SAID.keys() <= {*EXAMPLES}


def test_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


PAGES = ("tutorial", "how_to/compare_methods", "how_to/add_a_scorer")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_the_documentation_runs(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python, from the root of the repository, on the bundled model whatever it names."""
    named = loader.load

    def load_bundled(name: str = "seed", *places: Any, **options: Any) -> loader.LoadedModel:
        del name
        return named("seed", *places, **options)

    for module in (loader, engine):
        monkeypatch.setattr(module, "load", load_bundled)
    monkeypatch.chdir(ROOT)
    names = {"__name__": "__main__"}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)
    assert blocks
    for code in blocks:
        exec(compile(code, page, "exec"), names)
        assert capsys.readouterr().out.strip()
