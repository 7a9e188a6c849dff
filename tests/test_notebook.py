"""The notebook of the documentation: committed as it was executed, and it runs."""

from __future__ import annotations

import ast
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from larder.models import PACKAGED_MODELS

NOTEBOOK = Path(__file__).parents[1] / "docs" / "own_model.ipynb"
MOST_BYTES = 1 << 20
PICTURES = 3


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for cell in notebook["cells"] for one in cell.get("outputs", ())]


def check_executed(notebook: dict[str, Any]) -> None:
    """Assert that code cells ran once, in order, without an error, and drew their pictures."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = outputs(notebook)
    assert not [one for one in shown if one["output_type"] == "error"]
    assert sum("image/png" in one.get("data", {}) for one in shown) == PICTURES


def test_committed_notebook_was_executed() -> None:
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    check_executed(json.loads(NOTEBOOK.read_text(encoding="utf-8")))


def test_notebook_that_was_not_executed_is_found() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    notebook["cells"] = [
        cell | {"execution_count": None} if cell["cell_type"] == "code" else cell
        for cell in notebook["cells"]
    ]
    with pytest.raises(AssertionError):
        check_executed(notebook)


def test_imports_of_the_notebook_resolve() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    imports = [
        (node.module, alias.name)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("larder.")
        for alias in node.names
    ]
    assert imports
    for module, name in imports:
        assert name in vars(import_module(str(module))), f"{module}.{name}"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_notebook_runs() -> None:
    """With SmolLM2, in a kernel of its own; needs the packages of `make docs`."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    if not PACKAGED_MODELS["smollm2"].files:
        pytest.skip("smollm2 is not installed")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=None).execute()
    check_executed(notebook)
