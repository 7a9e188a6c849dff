"""Tables of documentation pages equal those generated from committed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from larder.core import InputError
from larder_bench.reports.docs_tables import (
    TableMark,
    by_budget,
    by_difference,
    by_paper,
    by_random,
    by_task,
    replace_tables,
)
from larder_bench.studies.study import CHECKOUT, read_study
from result_rows import CELLS, cell, write_rows

LONG = {"papers.md", "results.md", "results_seed.md"}  # tables of most studies
PAGES = [
    pytest.param(page, id=page.name, marks=[pytest.mark.extended] if page.name in LONG else [])
    for page in (CHECKOUT / "README.md", *sorted(CHECKOUT.glob("docs/*.md")))
]
RESULTS = CHECKOUT / "studies" / "results"


def test_column_per_budget_pools_tasks_and_puts_the_best_first() -> None:
    rows = [*CELLS, cell("h2o", budget="1/8")]
    head, _, *lines = by_budget(rows)
    assert head == "| policy | 1/4 |"
    assert lines[0] == "| full cache | 1.00 [1.00 1.00] |"
    assert [line.split(" | ")[0] for line in lines[1:]] == ["| snapkv", "| h2o", "| random"]


def test_column_per_task_has_all_budgets_in_a_cell() -> None:
    rows = [*CELLS, {**cell("snapkv"), "budget": "1/8"}]
    result, _, head, _, _, first, *_ = by_task(rows)
    assert result == "In each cell: 1/4, 1/8."
    assert head == "| policy | needles, 1,000 | needles, 2,000 |"
    assert first == "| snapkv | 0.50 0.50 | 0.50 |"


def test_differences_are_paired_and_signed() -> None:
    head, _, first, second = by_difference(CELLS, "", ["snapkv/h2o", "snapkv/full"])
    assert head == "| difference | 1/4 |"
    assert first.startswith("| snapkv less h2o | +") and second.startswith(
        "| snapkv less full | -0.50"
    )
    with pytest.raises(InputError, match="is not FIRST/SECOND"):
        by_difference(CELLS, "", ["snapkv/gone"])


def test_policies_are_listed_by_their_paired_interval_against_random_entries() -> None:
    likelihoods = {
        "random": (-2.0, -2.0, -2.5, -2.5),
        "h2o": (-3.0, -2.5, -4.0, -3.0),
        "tova": (-5.0, -5.0, -5.0, -5.0),
        "snapkv": (-1.0, -3.0, -1.0, -4.0),
        "kvzip": (-1.0, -1.5, -1.0, -1.5),
        "full": (0.0, 0.0, 0.0, 0.0),
    }
    rows = [
        cell(name, items=[{"counts": True, "log_likelihood": value} for value in values])
        for name, values in likelihoods.items()
    ]
    head, _, worse, no_better, better = by_random(rows, "log_likelihood")
    assert head == "| beside random entries | 1/4 |"
    assert worse == "| worse | `tova`, `h2o` |"
    assert (no_better, better) == ("| no better | `snapkv` |", "| better | `kvzip` |")
    with pytest.raises(InputError, match="needs rows of the control random"):
        by_random([cell("h2o")])


def test_column_heads_have_the_parameters_in_which_tasks_differ() -> None:
    tasks = ('needles(needles=4, hay="talk")', 'needles(needles=8, hay="talk")')
    rows = [cell("h2o", task=task) for task in tasks]
    assert by_task(rows)[0] == "| policy | needles(needles=4) | needles(needles=8) |"


def test_paper_values_are_beside_measured_ones() -> None:
    study = read_study("epicache_fig2")
    assert study.paper is not None
    ours = cell("exact_question", study=study.name, task=study.tasks[0].spelling, matched="tokens")
    lines = by_paper([ours], [study.paper.row(study.name)])
    assert lines[0].startswith("The paper: Llama-3.1-8B") and lines[2].startswith("Here: the emb")
    assert lines[4].startswith("| policy | budget | the paper |")
    assert lines[6].startswith("| exact_question | 1/4 | the best of all prompts")
    with pytest.raises(InputError, match="needs the study of a paper"):
        by_paper([ours], [])


def test_times_are_in_milliseconds_and_the_least_comes_first() -> None:
    rows = [cell("h2o"), {**cell("snapkv"), "latency": {"token": {"p50": 0.125}}}]
    assert by_budget(rows, "token_p50")[2:] == ["| snapkv | 125.0 |", "| h2o | 250.0 |"]
    with pytest.raises(InputError, match="No row has 'kl': take one of"):
        by_budget(rows, "kl")


def test_page_tables_are_replaced_idempotently(tmp_path: Path) -> None:
    rows = [{**row, "study": "recital"} for row in CELLS]
    write_rows(tmp_path, rows).rename(tmp_path / "recital.jsonl")
    mark = "<!-- table: study=recital policies=snapkv,full -->"
    page = f"above\n\n{mark}\nstale\n<!-- table: end -->\nbelow\n"
    once = replace_tables(page, tmp_path)
    assert "| snapkv | 0.50 [0.50 0.50] |" in once and "h2o" not in once and "stale" not in once
    assert "4 files, 16 scored items; `larder bench --study recital`, 1 min." in once
    assert once.startswith("above") and once.endswith("below\n")
    assert replace_tables(once, tmp_path) == once
    assert "Not measured yet" in replace_tables(page.replace("recital", "quality"), tmp_path)


@pytest.mark.parametrize("mark", ["by=budget", "study=x by=color", "study=x sort=up"])
def test_unknown_mark_is_refused(mark: str) -> None:
    with pytest.raises(InputError, match="A table "):
        TableMark.parse(mark)


def test_mark_without_rows_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, CELLS).rename(tmp_path / "recital.jsonl")
    page = "<!-- table: study=recital policies=gone -->\n<!-- table: end -->"
    with pytest.raises(InputError, match="No committed row of recital"):
        replace_tables(page, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_pages_match_committed_rows(page: Path) -> None:
    result = page.read_text(encoding="utf-8")
    again = replace_tables(result, RESULTS)
    assert again == result, "run: python -m larder_bench.reports.docs_tables README.md docs/*.md"
