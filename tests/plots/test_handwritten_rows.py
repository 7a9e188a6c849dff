"""Rows that no run writes give a one-line error or are left out, and labels are short in each
study.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from larder import LarderError
from larder.core import InputError
from larder_bench.plots.figure_selection import draw_all, draw_figures, load_results, parse_figure
from larder_bench.plots.figures.base import NothingToDraw
from larder_bench.plots.report import render_report
from larder_bench.results.rows import Row
from result_rows import cell, exhibit, write_rows

SENTENCES = [f"whole() > {one}() > pooled()" for one in ("snapkv", "keydiff")]
PERCENTILE, ITEMS = {"percentile": 5.0}, cell("h2o")["items"]


@pytest.mark.parametrize("name", ["active_kv_bytes", "full_kv_bytes", "context_tokens"])
@pytest.mark.parametrize("value", [0, None])
def test_cell_of_zero_bytes_is_refused(name: str, value: int | None, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [cell("h2o"), cell("snapkv", **{name: value})])
    for work in (lambda: load_results([path]), lambda: render_report([path])):
        with pytest.raises(InputError, match=f"snapkv .* {name} above 0, got {value}: measure"):
            work()


@pytest.mark.parametrize(
    "nothing", [{"bytes_share": 0.0}, {"budget_tokens": 0}, {"prefill_seconds": 0.0}]
)
def test_other_numbers_may_be_0(nothing: Row, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [cell("h2o"), cell("snapkv", **nothing)])
    assert draw_all(*load_results([path])) and "snapkv" in render_report([path])


@pytest.mark.parametrize(
    ("figure", "left_out", "drawn"),
    [
        ("recall", {"fetched_tokens": 0}, {"fetched_tokens": 64}),
        ("prompt_curve", {"percentile": None}, PERCENTILE),
    ],
)
def test_undrawable_values_are_skipped(
    figure: str, left_out: Row, drawn: Row, tmp_path: Path
) -> None:
    kind = figure.partition("_")[0]
    more: Row = {"layer": None, "step": None, "recall": {"1": 0.5}, "items": ITEMS}
    alone = [exhibit(kind, "h2o", **more, **left_out)]
    with pytest.raises(NothingToDraw, match=f"The figure {figure} needs"):
        draw_figures([parse_figure(figure)], *load_results([write_rows(tmp_path, alone)]))
    both = [*alone, exhibit(kind, "snapkv", **more, **drawn)]
    assert (
        len(draw_figures([parse_figure(figure)], *load_results([write_rows(tmp_path, both)]))) == 1
    )


def test_sentences_have_short_names_by_study(tmp_path: Path) -> None:
    rows = [cell(sentence, spelling=f"{sentence} > drop()") for sentence in SENTENCES]
    rows += [cell(SENTENCES[0], study="other", spelling="spelled"), cell("full")]
    path = write_rows(tmp_path, rows)
    assert list(load_results([path])[1]) == ["snapkv", "keydiff", "full", "whole, snapkv, pooled"]
    page = render_report([path], against=["keydiff"])
    assert "difference to keydiff" in page and page.count("<code>whole() &gt; snapkv()") == 1
    assert {row["policy"] for row in load_results([path], ["snapkv"])[0].cells} == {
        "snapkv",
        "full",
    }
    assert set(load_results([path], [SENTENCES[0]])[1]) == {
        "snapkv",
        "whole, snapkv, pooled",
        "full",
    }
    with pytest.raises(LarderError, match="No policy in the results files named 'keydif'"):
        render_report([path], against=["keydif"])
