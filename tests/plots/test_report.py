"""The page has tables, figures, commands and the environment, and loads nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from larder.core import InputError, UnknownName
from larder_bench.plots import report
from larder_bench.plots.report import inline_svg, render_report
from larder_bench.plots.style import INK, FigureWidth
from result_rows import CELLS, EXHIBITS, cell, write_rows

VOID = {"meta", "br", "path", "use", "rect"}


class Reader(HTMLParser):
    """Parser that records elements and checks that all are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.reached: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.reached.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw only one figure, which is enough."""
    monkeypatch.setattr("larder_bench.plots.figure_selection.FIGURE_ORDER", ("quality", "recall"))


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


@pytest.mark.usefixtures("few")
def test_report_is_self_contained(tmp_path: Path) -> None:
    evil = cell("<script>alert(1)</script>", spelling="a('<b>') > b()")
    path = write_rows(tmp_path, [*CELLS, evil, *EXHIBITS])
    page = render_report([path])
    assert page == render_report([path])
    reader = read(page)
    assert len(reader.ids) == len(set(reader.ids))
    assert all(place.startswith("#") for place in reader.reached)
    assert {place[1:] for place in reader.reached} <= set(reader.ids)
    assert "<script" not in page and "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert set(re.findall(r"https?://[^\"]*", page)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    words = " ".join(reader.words)
    assert "<script>alert(1)</script>" in words and "<fast>" in words
    assert f"larder report {path}" in words and "larder bench" in words


@pytest.mark.usefixtures("few")
def test_tables_hold_means_with_intervals_and_paired_differences(tmp_path: Path) -> None:
    page = render_report([write_rows(tmp_path, CELLS)])
    assert "<th scope=row>h2o</th><td><b>0.25</b> <i>[0.25, 0.25]</i>" in page
    assert "bytes 0.250, 250 tokens</small>" in page
    assert "needles, 1,000 tokens, equal bytes" in page
    # The full cache has no budget, so its mean goes across all of them.
    assert "<th scope=row>full cache</th><td><b>1.00</b>" in page
    assert "difference to random" in page and "difference to h2o" in page
    assert "<td><b>+0.25</b> <i>[+0.25, +0.25]</i></td>" in page
    alone = render_report([write_rows(tmp_path, CELLS)], against=["snapkv"])
    assert "difference to snapkv" in alone and "difference to random" not in alone


@pytest.mark.usefixtures("few")
def test_folder_report_has_all_files_and_a_heading_per_study(tmp_path: Path) -> None:
    for name in ("one", "throughput"):
        path = write_rows(tmp_path / name, [cell("h2o", study=name), cell("full", study=name)])
        path.rename(tmp_path / f"{name}.jsonl")
    page = render_report([tmp_path])
    assert page.count("<h3 class=study>") == 2 and "<h3 class=study>one</h3>" in page
    [claim] = re.findall(r"<h3 class=study>throughput</h3>\s*<p><b>Claim.</b> (.*?)</p>", page)
    assert claim.startswith("A bounded cache fits more sequences")
    assert f"--name one --out {tmp_path / 'one.jsonl'}" in page
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"none holds no \.jsonl file: name a folder"):
        render_report([tmp_path / "none"])


def test_insignificant_difference_is_not_bold(tmp_path: Path) -> None:
    rows = [cell(name, seed=seed) for name in ("h2o", "snapkv") for seed in (0, 1)]
    flipped = [item | {"exact": not item["exact"]} for item in cell("snapkv")["items"]]
    rows += [cell("snapkv", seed=2), cell("h2o", seed=2, items=[]), cell("h2o", seed=3)]
    rows += [cell("snapkv", seed=3, items=[i | {"exact": False} for i in flipped])]
    page = render_report([write_rows(tmp_path, rows)], against=["h2o"])
    [line] = re.findall(r"<tr><th scope=row>snapkv</th><td class=open>(.*?)</td>", page)
    assert line.startswith("+0.08 <i>[&minus;0.25, +0.25]")


def test_refusals_are_listed(tmp_path: Path) -> None:
    gone = cell("h2o", seed=2, items=None)
    gone = {name: value for name, value in gone.items() if name != "items"}
    page = render_report([write_rows(tmp_path, [*CELLS, gone | {"refused": "no room"}])], ["h2o"])
    assert "<li>h2o at 1/4 refused: no room</li>" in page
    assert "1 refused" in page and "1 cells were refused" in page


def test_unknown_baseline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="No policy in the results files named 'x'"):
        render_report([write_rows(tmp_path, CELLS)], against=["x"])


def test_figure_uses_the_page_colors() -> None:
    svg = (
        '<?xml version="1.0"?><svg width="72pt" height="36pt"><metadata>x</metadata>'
        f'<g id="a" style="fill: {INK}"/><use xlink:href="#a" clip-path="url(#a)"/></svg>'
    )
    assert inline_svg(svg, 3) == (
        '<svg style="width: 14.5%; min-width: 1.00in" role="img">'
        '<g id="f3-a" style="fill: var(--ink)"/>'
        '<use xlink:href="#f3-a" clip-path="url(#f3-a)"/></svg>'
    )


@pytest.mark.parametrize("width", FigureWidth)
def test_figure_scales_with_the_page_width(width: FigureWidth) -> None:
    points = width.inches * 72
    share = {FigureWidth.PAGE: "100.0%", FigureWidth.COLUMN: "47.8%"}[width]
    assert f'style="width: {share}; ' in inline_svg(f'<svg width="{points}pt" height="9pt"/>', 0)


def test_every_color_of_the_page_is_set_in_both_schemes() -> None:
    style = report._asset("report.css")
    light, dark = style.split("prefers-color-scheme: dark")
    for name in report._PAGE.values():
        assert f" {name}: #" in light
        assert f" {name}: #" in dark or name in ("--d6",)
