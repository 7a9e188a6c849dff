"""Self-contained HTML page about results: tables, figures, commands and the environment.

The page loads no script, font or image from elsewhere. Figures are SVG whose colors follow the
page, so that a dark color scheme works, too. Equal results give equal pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from larder.core import UnknownName, unknown_name_message
from larder_bench.plots import score_groups
from larder_bench.plots.figure_selection import (
    PolicyLabels,
    draw_all,
    relabel_results,
    select_policies,
)
from larder_bench.plots.html_tables import escape_html, group_tables, paper_table
from larder_bench.plots.policy_styles import COLORS, PALE, assign_styles
from larder_bench.plots.rerun_commands import rerun_commands
from larder_bench.plots.style import (
    FAINT,
    INK,
    LINE,
    PAPER,
    SOFT,
    Drawing,
    FigureWidth,
    ImageFormat,
)
from larder_bench.results.papers import Paper
from larder_bench.results.rows import Results, Row
from larder_bench.results.tables import SPEED, cell_seconds
from larder_bench.studies.study import read_study, study_names

BASELINES = ("random", "h2o", "h2o_blockwise")
# CSS variable of each color of a figure on the page.
_PAGE = {
    INK: "--ink",
    SOFT: "--soft",
    FAINT: "--faint",
    LINE: "--line",
    PAPER: "--paper",
    PALE: "--pale",
    **{color: f"--c{number}" for number, (color, _) in enumerate(COLORS)},
    # Text as dark as its line has the same color on the page.
    **{dark: f"--d{number}" for number, (color, dark) in enumerate(COLORS) if dark != color},
}
_ENVIRONMENT_KEYS = (
    "larder",
    "commit",
    "python",
    "torch",
    "transformers",
    "kvpress",
    "optimum-quanto",
    "hqq",
    "platform",
    "cpu",
    "accelerator",
    "threads",
    "date",
)


def render_report(
    paths: Sequence[Path],
    policies: Sequence[str] = (),
    title: str = "",
    against: Sequence[str] | None = None,
) -> str:
    """HTML page about results.

    Args:
        policies: names of policies; all by default.
        title: title of the page; the studies' names by default.
        against: policies that all others are compared with; by default those of `BASELINES` that
            the results have.

    Raises:
        InputError: a file cannot be read.
        UnknownName: a policy has no row.
    """
    results, names = select_policies(paths, policies)
    bases = _baseline_labels(results, names, against)
    relabeled = relabel_results(results, names)
    drawings = draw_all(relabeled, assign_styles(names.values()))
    return Template(_asset("report.html")).substitute(
        title=escape_html(title or _title(results)),
        style=_asset("report.css"),
        summary=escape_html(_summary(results)),
        tables="\n".join(_tables(results, relabeled, names, bases)),
        figures="\n".join(_figure(index, one) for index, one in enumerate(drawings)),
        policies=_policies(results, names),
        environments="\n".join(_environments(results)),
        commands=escape_html("\n".join(rerun_commands(results, paths, policies))),
    )


def _baseline_labels(
    results: Results, names: PolicyLabels, against: Sequence[str] | None
) -> list[str]:
    """Labels of the policies that all others are compared with.

    Raises:
        UnknownName: a policy has no cell.
    """
    keys = dict.fromkeys((row["study"], row["policy"]) for row in results.cells)
    known = {key: names[key] for key in keys}
    for name in against or ():
        if not any(name in (long, short) for (_, long), short in known.items()):
            shorts = list(dict.fromkeys(known.values()))
            raise UnknownName(unknown_name_message("policy in the results files", name, shorts))
    baselines = BASELINES if against is None else against
    return list(
        dict.fromkeys(
            short
            for name in baselines
            for (_, long), short in known.items()
            if name in (long, short)
        )
    )


def _of_study(study: str, names: PolicyLabels) -> dict[str, str]:
    return {policy: short for (name, policy), short in names.items() if name == study}


def inline_svg(svg: str, number: int) -> str:
    """SVG file as a part of the page: with the page's colors and unique ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="f{number}-', svg)
    svg = re.sub(r"url\(#", f"url(#f{number}-", svg)
    svg = re.sub(r'href="#', f'href="#f{number}-', svg)
    svg = re.sub(r'(<svg\b[^>]*?) width="([\d.]+)pt"', _sized, svg, count=1)
    svg = re.sub(r'(<svg\b[^>]*?) height="[\d.]+pt"', r"\1", svg, count=1)
    for color, name in _PAGE.items():
        svg = svg.replace(f": {color}", f": var({name})")
    return svg


def _sized(match: re.Match[str]) -> str:
    """Size attributes of a figure: a share of the page's width, and at least its size in print."""
    inches = float(match[2]) / 72
    share = min(1.0, inches / FigureWidth.PAGE.inches)
    return f'{match[1]} style="width: {share:.1%}; min-width: {inches:.2f}in" role="img"'


def _figure(number: int, drawing: Drawing) -> str:
    svg = inline_svg(drawing.save(ImageFormat.SVG).decode(), number)
    return (
        f'<figure id="figure-{number + 1}"><div class="wide">{svg}</div><figcaption>'
        f"<b>Figure {number + 1}. {escape_html(drawing.title)}.</b> {escape_html(drawing.caption)}"
        "</figcaption></figure>"
    )


def _tables(
    results: Results, relabeled: Results, names: PolicyLabels, bases: Sequence[str]
) -> Iterator[str]:
    groups = score_groups.group_cells(relabeled.cells)
    titles = score_groups.group_titles(list(groups), "matched")
    studies = list(dict.fromkeys(group.study for group in groups))
    for study in studies:
        if len(studies) > 1:
            yield f"<h3 class=study>{escape_html(study)}</h3>"
        if claim := _claim(study):
            yield f"<p><b>Claim.</b> {escape_html(claim)}</p>"
        for group, rows in groups.items():
            if group.study == study and any(map(_has_table, rows)):
                yield from group_tables(titles[group], rows, bases)
        for row in results.papers:
            if row["study"] == study:
                cells = [cell for cell in results.cells if cell["study"] == study]
                yield from paper_table(Paper.of(row), cells, _of_study(study, names))


def _has_table(row: Row) -> bool:
    """Test if any table shows a row."""
    has_scores = bool(row.get("items")) or SPEED.key in row
    return has_scores or bool(cell_seconds(row)) or "refused" in row


def _claim(study: str) -> str:
    """Claim of a study, if its file is available."""
    return read_study(study).claim if study in study_names() else ""


def _policies(results: Results, names: PolicyLabels) -> str:
    spellings = dict.fromkeys(
        (names[row["study"], row["policy"]], row["spelling"]) for row in results.cells
    )
    lines = (
        "<tr><th "
        f"scope=row>{escape_html(name)}</th><td><code>{escape_html(spelling)}</code></td></tr>"
        for name, spelling in spellings
    )
    return "\n".join(lines)


def _environments(results: Results) -> Iterator[str]:
    for environment in results.environments.values():
        fields = [(name, environment[name]) for name in _ENVIRONMENT_KEYS if environment.get(name)]
        fields.append(
            ("cells", sum(r.get("environment") == environment["id"] for r in results.cells))
        )
        lines = (f"<dt>{name}</dt><dd>{escape_html(str(value))}</dd>" for name, value in fields)
        yield f"<dl>{''.join(lines)}</dl>"


def _title(results: Results) -> str:
    rows = (*results.cells, *results.exhibits)
    studies = dict.fromkeys(row["study"] for row in rows if row["study"])
    return ", ".join(studies) or "Results"


def _summary(results: Results) -> str:
    """One-line summary of the page: models, cells, policies and items."""
    policies = len({row["policy"] for row in results.cells})
    models = ", ".join(dict.fromkeys(row["model"] for row in (*results.cells, *results.exhibits)))
    items = sum(len(score_groups.counted_items(row)) for row in results.measured)
    refused = len(results.cells) - len(results.measured)
    return (
        f"Model {models}. {len(results.cells):,} cells, {policies} policies, {items:,} scored items"
        + (f"; {refused:,} cells were refused." if refused else ".")
    )


def _asset(name: str) -> str:
    return files("larder_bench.plots").joinpath(name).read_text(encoding="utf-8").strip()
