"""Reported values are read with their study, stored in its rows, and compared with measured
ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from larder import LarderError
from larder.core import BadParameter, UnknownName, UsageError
from larder.evaluation import Bootstrap
from larder_bench.execution.runner import StudyRunner, validate_study
from larder_bench.plots.report import render_report
from larder_bench.reports.paper_comparison import (
    compare_with_paper,
    comparison_document,
    comparison_markdown,
    comparison_table,
)
from larder_bench.results.papers import Paper, ReportedValue
from larder_bench.results.rows import Row, read_results
from larder_bench.studies.study import Study, StudyTask, read_study, replace_fields
from result_rows import CELLS, cell, write_rows

TEXT = """
name = "tiny"
matched = "bytes"
measure = ["forced", "generated"]
budgets = ["1/4"]
policies = ["snapkv"]
controls = ["full", "rag_2k"]
[[tasks]]
spelling = "passkey()"
tokens = [200, 300]
[paper]
cite = 'Authors, "Title" (2024), arXiv:2406.13035, table 1'
setup = "A larger model."
differs = "all of it"
[[paper.values]]
policy = "snapkv"
budget = "1/4"
scale = "exact"
paper = 41
measure = "forced"
[[paper.values]]
policy = "full"
budget = "full"
scale = "exact"
paper = "more"
measure = "forced"
"""
CITE = 'Somebody, "Something" (2024), arXiv:2406.13035, table 6'
ROW_OF_SMALL = Paper(
    CITE,
    "Larger <models>.",
    ("the model", "the data"),
    (
        ReportedValue("snapkv", "1/4", "exact", 41.5, unit="% F1", says="MF-en"),
        ReportedValue("full", "1/1", "exact", "above h2o", tokens=1000),
        ReportedValue("h2o", "1/4", "active_kv_bytes", 0.2, against="full"),
        ReportedValue("h2o", "1/4", "token_p50", 0.05, unit="s"),
        ReportedValue("h2o", "1/4", "exact", 1, kind="needle", task="needles(needles=4)"),
        ReportedValue("absent", "1/4", "exact", 2.0),
        ReportedValue("snapkv", "1/4", "exact", "above 0", above="h2o", tokens=2000),
        ReportedValue("h2o", "1/4", "exact", "3 times as good", against="random"),
    ),
)


def read(tmp_path: Path, old: str = "", new: str = "") -> Study:
    path = tmp_path / "study.toml"
    path.write_text(TEXT.replace(old, new, 1))
    return read_study(str(path))


def test_paper_is_read_with_its_study(tmp_path: Path) -> None:
    paper = read(tmp_path).paper
    assert paper is not None and paper.differs == ("all of it",)
    assert [(one.budget, one.paper) for one in paper.values] == [("1/4", 41), ("1/1", "more")]
    assert Paper.of(paper.row("tiny")) == paper
    assert paper.row("tiny")["values"][1] == {
        "policy": "full", "budget": "1/1", "scale": "exact", "paper": "more", "measure": "forced",
    }  # fmt: skip


def test_bars_in_titles_are_escaped_in_tables() -> None:
    paper = Paper(CITE, "Larger.", (), (ReportedValue("snapkv", "1/4", "kl", 0.5),))
    [line] = [
        line for line in comparison_markdown(paper, CELLS, {}).splitlines() if "snapkv" in line
    ]
    assert r"KL(full \|\| policy)" in line and line.replace(r"\|", "").count("|") == 6


def test_paper_values_without_a_cell_are_dropped(tmp_path: Path) -> None:
    study = read(tmp_path, 'scale = "exact"', 'scale = "exact"\ntokens = 300')
    tasks = {"tasks": (StudyTask("passkey()", (400,)),)}
    for fields, left in ((tasks, ["full"]), ({"budgets": ("1/8",)}, ["full"]), ({}, None)):
        paper = replace_fields(study, fields).paper
        assert paper is not None
        assert [one.policy for one in paper.values] == (left or ["snapkv", "full"])
    paper = replace_fields(study, {"measure": ("generated",)}).paper
    assert paper is not None and not paper.values and paper.cite
    with pytest.raises(UsageError, match="files must be 1 or more"):
        replace_fields(study, {"files": 0})


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ('policy = "snapkv"', 'policy = "h2o"', UnknownName, "values 1: No policy of the study"),
        ('budget = "1/4"', 'budget = "1/5"', UnknownName, "No budget of the study named '1/5'"),
        ('budget = "full"', 'budget = "1/4"', UsageError, "full at the budget 1/4.*take full"),
        ("paper = 41", 'paper = 41\ntask = "needles()"', UnknownName, "No task of the study"),
        ("paper = 41", "paper = 41\ntokens = 400", UnknownName, "200, 300"),
        ("paper = 41", 'paper = 41\nagainst = "h2o"', UnknownName, "No policy of the study"),
        (
            "paper = 41",
            'paper = 41\nagainst = "full"\nabove = "full"',
            UsageError,
            "one of the two",
        ),
        ("paper = 41", "paper = true", UsageError, "Expected `int . float . str`, got `bool`"),
        ("paper = 41", "paper = nan", UsageError, "a finite number, or a text"),
        ("paper = 41", "papre = 41", UnknownName, "Did you mean 'paper'"),
        ('scale = "exact"', 'scale = "exakt"', UnknownName, "Did you mean 'exact'"),
        ('scale = "exact"\n', "", UsageError, "missing required field `scale`"),
        ('measure = "forced"\n', "", UsageError, "must say measure: forced or generated"),
        ("cite =", "sight =", UnknownName, "paper: No key named 'sight'"),
        ('setup = "A larger model."\n', "", UsageError, "missing required field `setup`"),
    ],
)
def test_invalid_papers_are_refused(
    tmp_path: Path, old: str, new: str, kind: type[LarderError], message: str
) -> None:
    assert old in TEXT
    with pytest.raises(kind, match=message):
        validate_study(read(tmp_path, old, new))


def test_measured_values_use_the_named_cells() -> None:
    twice, of_full, ratio, seconds, one_kind, absent, more, none = compare_with_paper(
        ROW_OF_SMALL, CELLS
    )
    assert twice.measured["seed"].mean == 0.5 and twice.measured_text("seed", {}) == "0.50"
    assert (
        twice.reported_text() == "41.5 % F1 (MF-en)"
        and twice.scale_text({}) == "Exact match; all tasks"
    )
    assert (
        of_full.measured["seed"].mean == 1.0
        and of_full.scale_text({}) == "Exact match; 1000 tokens"
    )
    assert ratio.measured_text("seed", {}) == "0.25×"
    assert seconds.measured["seed"].mean == 0.25
    assert one_kind.measured["seed"].mean == 0.25
    assert absent.measured == {} and absent.measured_text("seed", {}) == "not measured"
    assert more.measured_text("seed", {}) == "+0.25" and more.scale_text({}).startswith(
        "Exact match, less that of h2o"
    )
    assert none.measured_text("seed", {}) == "no ratio: random has none or 0"


def test_refused_and_differently_measured_files_are_excluded() -> None:
    ours: list[Row] = [cell("h2o"), cell("h2o", seed=1, kind="x", items=[])]
    ours += [cell("h2o", seed=2, refused="no room"), cell("h2o", seed=3, model="other", items=[])]
    ours += [cell("h2o", seed=4, measure="generated"), cell("h2o", seed=5, matched="tokens")]
    value = ReportedValue("h2o", "1/4", "exact", 1.0, measure="forced", matched="bytes")
    prefill = ReportedValue("h2o", "1/4", "prefill_seconds", 1.0, measure="forced", matched="bytes")
    exact, seconds = compare_with_paper(Paper("", "", (), (value, prefill)), ours)
    assert exact.measured["seed"].mean == 0.25 and list(exact.measured) == ["seed"]
    assert exact.measured_text("other", {}) == "not measured"
    [refused] = compare_with_paper(
        Paper("", "", (), (value,)), [cell("h2o", refused="no room", items=[])]
    )
    assert refused.measured_text("seed", {}) == "refused"
    assert (
        seconds.measured["seed"].mean == 1.5
        and seconds.measured_text("seed", {}) == "1.5000 [1.0000, 2.0000]"
    )


def test_log_likelihoods_are_shown_beside_zero_exact_match() -> None:
    both: list[Row] = [
        {"exact": False, "log_likelihood": likely, "counts": True} for likely in (-3.0, -5.0)
    ]
    rows = [cell("h2o", items=both[:1]), cell("snapkv", items=both[1:]), cell("full", items=[])]
    values = [ReportedValue(policy, "1/4", "exact", 1.0) for policy in ("h2o", "snapkv")]
    values += [ReportedValue("h2o", "1/4", "exact", 1.0, above="snapkv")]
    paper = Paper("", "", (), tuple(values))
    head, (first, second, more) = comparison_table(compare_with_paper(paper, rows), ["seed"], {})
    assert head[-1].startswith("log-likelihood") and "(seed)" in head[-1]
    assert (first[-2:], second[-1], more[-1]) == (["0.00", "-3.00"], "-5.00", "+2.00")
    short = comparison_markdown(paper, rows, {"snapkv": "S"})
    assert "| S | 1/4" in short and "less that of S" in short


def test_tables_have_reported_and_measured_values_and_differences_of_setup(tmp_path: Path) -> None:
    result = comparison_markdown(ROW_OF_SMALL, CELLS, {})
    assert result.startswith(f"## {CITE}\n\nThe paper: Larger <models>.\n")
    assert "| snapkv | 1/4 | 41.5 % F1 (MF-en) | Exact match; all tasks | 0.50 |" in result
    assert "| full | full | above h2o |" in result and "- the data\n" in result
    here = comparison_document(ROW_OF_SMALL, CELLS)["values"]
    assert here[0]["here"] == {"seed": {"mean": 0.5, "low": 0.5, "high": 0.5}}
    assert here[5]["here"] == {} and here[6]["above"] == "h2o"


def test_report_needs_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("larder_bench.plots.figure_selection.FIGURE_ORDER", ())
    old = Paper("old", "old").row("small")
    page = render_report([write_rows(tmp_path, [old, ROW_OF_SMALL.row("small"), *CELLS])])
    assert "table 6</h3>" in page and "Larger &lt;models&gt;." in page and ">old<" not in page
    line = "<th scope=row>snapkv</th><td>1/4</td><td>41.5 % F1 (MF-en)</td>"
    assert f"{line}<td>Exact match; all tasks</td><td>0.50</td>" in page
    assert "<li>the data</li>" in page and "absent" not in page


def test_rows_of_a_later_version_are_refused() -> None:
    row = ROW_OF_SMALL.row("small")
    [value, *_] = row["values"]
    assert Paper.of(row) == ROW_OF_SMALL
    for other, message in (({"scale": "new"}, "No scale named 'new'"), ({"new": 1}, "named 'new'")):
        with pytest.raises(UnknownName, match=f"The paper of small: .*{message}"):
            Paper.of(row | {"values": [value | other]})


def test_paper_row_is_written_on_change_only(tmp_path: Path) -> None:
    out, task = tmp_path / "rows.jsonl", StudyTask("passkey", (100,))
    value = ReportedValue("full", "1/1", "exact", 1.0, task="passkey")

    def append_paper(paper: Paper) -> None:
        study = Study(
            "s", (task,), matched=("bytes",), policies=("full",), controls=(), paper=paper
        )
        StudyRunner(study, out, lambda model: None, 1)._append_paper()  # pyright: ignore

    for paper in (Paper("one", "x", (), (value,)), Paper("one", "x", (), (value,))):
        append_paper(paper)
    assert [row["cite"] for row in read_results([out]).papers] == ["one"]
    assert len(out.read_text().splitlines()) == 1
    append_paper(Paper("two", "x"))
    assert [row["cite"] for row in read_results([out]).papers] == ["two"]
    [before] = [row for row in map(eval, out.read_text().splitlines()) if row["cite"] == "one"]
    assert before["values"][0]["task"].startswith("passkey(")


def test_ratio_is_of_means_resampled_by_file() -> None:
    ratio = Bootstrap().ratio([[2.0, 4.0], [6.0]], [[1.0], [2.0, 0.0]])
    assert ratio.mean == 4.0 and ratio.low == 3.0 and ratio.high == 6.0
    with pytest.raises(BadParameter, match="above 0"):
        Bootstrap().ratio([[1.0]], [[0.0]])
    with pytest.raises(BadParameter, match="the same files"):
        Bootstrap().ratio([[1.0]], [[1.0], [1.0]])
