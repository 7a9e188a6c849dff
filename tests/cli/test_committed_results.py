"""Committed rows belong to their study, and documented commands draw the documented figures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from cli_results import Run
from larder.core import InputError
from larder_bench.execution.runner import validate_study
from larder_bench.plots.figure_selection import draw_all, load_results
from larder_bench.reports.study_index import (
    BEGIN,
    END,
    FOLDER,
    RESULTS,
    main,
    pending_cells,
    replace_table,
    study_table,
)
from larder_bench.results.rows import Row, append_rows, read_results, read_rows
from larder_bench.studies.study import CHECKOUT, read_study, study_names
from result_rows import CELLS, cell, write_rows

COMMITTED = sorted(RESULTS.glob("*.jsonl.zst"))
PAGES = [CHECKOUT / "README.md", *sorted(CHECKOUT.glob("docs/*.md"))]
FIGURES = CHECKOUT / "docs" / "figures"
ASKED = ("study", "task", "tokens", "spelling", "budget", "matched", "measure")
PLOT = re.compile(r"^ *(larder plot .*studies/results/.*)$", re.MULTILINE)
ROWS = re.compile(r"studies/results/\S+")


def study_of(path: Path) -> str:
    return path.name.partition(".")[0]


def asked(row: Row) -> tuple[object, ...]:
    """Cell independent of model and seed: a study can be run with others."""
    return tuple(row[name] for name in ASKED)


def faults(path: Path) -> Iterator[str]:
    """Faults of a file of committed rows."""
    if study_of(path) not in study_names():
        yield "of no study"
        return
    try:
        found = read_results([path])
    except InputError as error:
        yield str(error)
        return
    wanted = {asked(one.head({})) for one in validate_study(read_study(study_of(path)))}
    if strange := [row for row in found.cells if asked(row) not in wanted]:
        yield f"{len(strange)} cells that the study has not, the first {asked(strange[0])}"
    missing = wanted - {asked(row) for row in found.cells}
    if len(missing) != (declared := pending_cells(RESULTS).get(study_of(path), 0)):
        yield f"{len(missing)} cells of the study are missing, and {declared} are told to be"
    if any(row.get("environment") not in found.environments for row in found.cells):
        yield "cells whose environment is not told"


def plots_of(pages: list[Path]) -> list[list[str]]:
    """Arguments of every documented command that draws from existing committed rows."""
    found = [shlex.split(line) for page in pages for line in PLOT.findall(page.read_text())]
    return [words for words in found if all(map(Path.exists, rows_named(words)))]


def rows_named(words: list[str]) -> list[Path]:
    return [CHECKOUT / word for word in words if ROWS.fullmatch(word)]


@pytest.mark.parametrize("path", COMMITTED, ids=study_of)
def test_committed_rows_are_of_their_study(path: Path) -> None:
    assert list(faults(path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMITTED, ids=study_of)
def test_committed_rows_can_be_drawn(path: Path) -> None:
    assert draw_all(*load_results([path]))


def test_faulty_rows_are_detected(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [cell("h2o", study="recital")])
    assert list(faults(path)) == ["of no study"]
    path = path.rename(tmp_path / "recital.jsonl")
    result = " ".join(faults(path))
    assert (
        "1 cells that the study has not" in result and "are missing, and 0 are told to be" in result
    )
    path.write_text('{"schema": 0}\n')
    assert "not a row of schema 1" in next(faults(path))
    lost = write_rows(tmp_path, [cell("h2o", study="recital", environment="x")])
    assert "cells whose environment is not told" in list(faults(lost.rename(path)))


def draw_again(run: Run, words: list[str], out: Path) -> None:
    """Run `larder plot` as documented, for SVG files in another folder."""
    named = dict(zip(rows_named(words), ROWS.findall(" ".join(words)), strict=True))
    result = [next((p for p, name in named.items() if name == word), word) for word in words]
    assert run(*result[1:], "--out", out, "--format", "svg").exit_code == 0


def differing(shown: list[Path], drawn: Path) -> list[str]:
    """Figures that no command draws, or, with the pinned matplotlib, draws differently."""
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    is_pinned = f"matplotlib=={version('matplotlib')}" in pins
    again = {path: drawn / path.name for path in shown}
    return [
        path.name
        for path, other in again.items()
        if not other.is_file() or (is_pinned and path.read_bytes() != other.read_bytes())
    ]


@pytest.mark.extended
def test_docs_show_figures_that_their_commands_draw(run: Run, tmp_path: Path) -> None:
    for words in plots_of(PAGES):
        draw_again(run, words, tmp_path)
    assert differing(sorted(FIGURES.glob("*.svg")), tmp_path) == []


@pytest.mark.extended
def test_changed_figure_is_detected(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.CHECKOUT", tmp_path)
    rows = read_rows(write_rows(tmp_path, CELLS))
    append_rows(tmp_path / "studies" / "results" / "small.jsonl.zst", rows)
    page, shown = tmp_path / "page.md", place(tmp_path / "docs" / "memory.svg")
    line = "larder plot studies/results/{}.jsonl.zst --figure memory --out docs/figures"
    page.write_text(f"See:\n\n    {line.format('small')}\n    {line.format('gone')}\n")
    [words] = plots_of([page])
    draw_again(run, words, tmp_path / "again")
    assert differing([shown], tmp_path) == ["memory.svg"]  # no command draws it
    shown.write_bytes((tmp_path / "again" / "memory.svg").read_bytes())
    assert differing([shown], tmp_path / "again") == []
    shown.write_bytes(shown.read_bytes().replace(b"1", b"2"))
    assert differing([shown], tmp_path / "again") == ["memory.svg"]


def place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.extended
def test_table_of_studies_is_complete(tmp_path: Path) -> None:
    result = (CHECKOUT / FOLDER / "README.md").read_text()
    lines = study_table(CHECKOUT / FOLDER, RESULTS)
    assert replace_table(result, lines) == result, (
        "run: python -m larder_bench.reports.study_index studies/README.md"
    )
    assert len(lines) == 2 + len(study_names())
    path = tmp_path / "other.md"
    path.write_text(f"before\n{BEGIN}\nstale line\n{END}\nbehind\n")
    main(path)
    assert path.read_text().splitlines() == ["before", BEGIN, *lines, END, "behind"]
    with pytest.raises(InputError, match="has no <!-- studies: begin -->"):
        replace_table("nothing", lines)


def test_minutes_of_a_study_are_those_of_its_rows(tmp_path: Path) -> None:
    path = place(tmp_path / "studies" / "small.toml")
    path.write_text(
        'name = "small"\nclaim = "None."\npolicies = ["h2o"]\n'
        "[[tasks]]\nspelling = 'needles(hay=\"prose\")'\ntokens = 100\n"
    )
    rows = [cell("h2o", seed=seed, seconds=100.0) for seed in (0, 1)]
    write_rows(tmp_path, rows).rename(tmp_path / "small.jsonl")
    assert study_table(path.parent, tmp_path)[2:] == [
        "| small | None. | `larder bench --study small --corpus FOLDER` | 3 |"
    ]
    assert study_table(path.parent, path.parent)[2].endswith("` |  |")
