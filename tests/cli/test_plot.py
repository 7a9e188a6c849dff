"""`larder plot` and `larder report` write files and print their names."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from cli_results import complaint, document
from larder.cli.main import app
from result_rows import CELLS, EXHIBITS, cell, write_rows


def run(*words: str) -> Result:
    """Run without a model."""
    return CliRunner().invoke(app, list(words))


def test_plot_writes_figures_and_names_them(tmp_path: Path) -> None:
    results = write_rows(tmp_path, EXHIBITS)
    out = tmp_path / "new" / "figures"
    figures = ("--figure", "recall", "--figure", 'recall(along="tokens")')
    result = document(
        run("plot", str(results), *figures, "--out", str(out), "--json", "--format=svg")
    )
    assert [figure["figure"] for figure in result["figures"]] == ["recall", "recall"]
    files = [Path(file) for figure in result["figures"] for file in figure["files"]]
    assert [file.name for file in files] == ["recall.svg", "recall-2.svg"]
    assert all(file.read_text().startswith("<?xml") for file in files)
    shown = run("plot", str(results), "--figure", "breakdown", "--out", str(out))
    assert "No figure named 'breakdown'" in complaint(shown, 2)


def test_plot_refuses_invalid_arguments(tmp_path: Path) -> None:
    results = str(write_rows(tmp_path, CELLS))
    out = ("--out", str(tmp_path / "figures"))
    assert "--format takes svg and png" in complaint(run("plot", results, "--format", "gif"), 2)
    assert "needs rows of kind 'recall'" in complaint(
        run("plot", results, "--figure", "recall", *out), 1
    )
    assert "The figure 'recall(' does not parse" in complaint(
        run("plot", results, "--figure", "recall(", *out), 2
    )
    assert "none.jsonl cannot be read" in complaint(run("plot", "none.jsonl", *out), 1)
    assert "cannot be written" in complaint(
        run("plot", results, "--figure", "memory", "--out", results), 1
    )
    nothing = str(write_rows(tmp_path, [cell("h2o", refused="too small", items=[])]))
    assert "suffice for no figure" in complaint(run("plot", nothing, *out), 1)


def test_report_writes_a_page(tmp_path: Path) -> None:
    results, out = write_rows(tmp_path, EXHIBITS[-1:]), tmp_path / "page.html"
    result = run("report", str(results), "--out", str(out), "--title", "What <we> saw")
    assert result.stdout.strip() == str(out)
    assert "<h1>What &lt;we&gt; saw</h1>" in out.read_text()
