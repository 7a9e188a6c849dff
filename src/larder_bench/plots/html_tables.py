"""HTML tables of a group of cells: means with intervals, and paired differences to baselines.

The numbers are those of the tables that `larder bench` prints (`larder_bench.results.tables`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from larder.evaluation import Interval
from larder_bench.plots.policy_styles import FULL, short_label
from larder_bench.reports.paper_comparison import compare_with_paper, comparison_table
from larder_bench.results.budget_labels import OWN, WHOLE
from larder_bench.results.papers import Paper
from larder_bench.results.rows import Row
from larder_bench.results.tables import SCALES, TIMES, ItemScale, ScoreTable


def group_tables(title: str, rows: Sequence[Row], bases: Sequence[str]) -> Iterator[str]:
    """Tables of every score that the cells have, under one heading."""
    table = ScoreTable(rows)
    counts = escape_html(table.count_label())
    yield f"<section><h3>{escape_html(title)}</h3><p class=aside>{counts}</p>"
    if why := [line.removeprefix("- ") for line in table.refusals() if line]:
        yield f"<ul class=aside>{''.join(f'<li>{escape_html(line)}</li>' for line in why)}</ul>"
    for scale in table.scales_with_data(SCALES):
        yield _means(table, scale)
        for base in bases:
            if base in table.names:
                yield from _differences(table, scale, base)
    yield from _time_table(table)
    yield "</section>"


def escape_html(text: str) -> str:
    """Escaped text in ASCII, safe anywhere on the page."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _time_table(table: ScoreTable) -> Iterator[str]:
    """Table of timings, one line per policy and budget."""
    if not (fields := table.timed_fields()):
        return
    head = "".join(f"<th scope=col>{TIMES[name]}</th>" for name in fields)
    lines: list[str] = []
    for name in table.names:
        for budget in table.budgets:
            if seconds := table.seconds(name, budget):
                cells = "".join(
                    f"<td>{seconds[t]:.4f}</td>" if t in seconds else "<td>" for t in fields
                )
                label = escape_html(short_label(name))
                headers = f"<th scope=row>{label}</th><td>{escape_html(budget)}</td>"
                lines.append(f"<tr>{headers}{cells}</tr>")
    html = html_table("", f"<th scope=col>policy</th><th scope=col>budget</th>{head}", lines)
    if table.scales_with_data(SCALES):
        html = f"<details><summary>Seconds</summary>{html}</details>"
    yield html


def _means(table: ScoreTable, scale: ItemScale) -> str:
    """Table with a line per policy; below each mean are its interval, the share of the bytes, and
    the budget in tokens per kv head.

    Budgets that only the full cache has, or a policy with a size of its own, have no column: their
    means span all columns.
    """
    columns = [budget for budget in table.budgets if budget not in (WHOLE, OWN)]
    columns = columns or list(table.budgets)
    head = "".join(f"<th scope=col>{escape_html(budget)}</th>" for budget in columns)
    lines = []
    for name in table.names:
        alone = [b for b in table.budgets if b not in columns and _has(table, scale, name, b)]
        cells = [_mean(table, scale, name, budget) for budget in columns]
        if alone:
            cells = [_mean(table, scale, name, alone[0], len(columns))]
        lines.append(
            f"<tr><th scope=row>{escape_html(short_label(name))}</th>{''.join(cells)}</tr>"
        )
    return html_table(scale.title, f"<th scope=col>policy</th>{head}", lines)


def _has(table: ScoreTable, scale: ItemScale, name: str, budget: str) -> bool:
    return table.interval(scale, name, budget) is not None or table.refused(name, budget) > 0


def _mean(table: ScoreTable, scale: ItemScale, name: str, budget: str, across: int = 1) -> str:
    interval, refused = table.interval(scale, name, budget), table.refused(name, budget)
    start = f"<td colspan={across}" if across > 1 else "<td"
    if interval is None:
        return f"{start} class=none>{'refused' if refused else ''}</td>"
    note = f", {refused} refused" if refused else ""
    tokens = f", {table.budget_tokens(name, budget):,} tokens" if budget != WHOLE else ""
    share = f"bytes {table.shares(name, budget)}{tokens}{note}"
    mean = _signed(interval.mean, scale.digits)
    ends = _interval_ends(interval, scale.digits)
    return f"{start}><b>{mean}</b> <i>{ends}</i><small>{share}</small></td>"


def _differences(table: ScoreTable, scale: ItemScale, base: str) -> Iterator[str]:
    budgets = [b for b in table.budgets if table.interval(scale, base, b) is not None]
    if not budgets:
        return
    lines = []
    for name in table.names:
        if name in (base, FULL):
            continue
        differences = [table.difference(scale, name, base, budget) for budget in budgets]
        if any(interval is not None for interval in differences):
            cells = "".join(_difference(interval, scale.digits) for interval in differences)
            lines.append(f"<tr><th scope=row>{escape_html(short_label(name))}</th>{cells}</tr>")
    if lines:
        head = "".join(f"<th scope=col>{escape_html(budget)}</th>" for budget in budgets)
        title = f"{scale.title}: difference to {short_label(base)}, pair by pair"
        html = html_table("", f"<th scope=col>policy</th>{head}", lines)
        yield f"<details><summary>{escape_html(title)}</summary>{html}</details>"


def _difference(interval: Interval | None, digits: int) -> str:
    if interval is None:
        return "<td class=none></td>"
    mean = f"{_signed(interval.mean, digits, '+')}"
    ends = f"<i>{_interval_ends(interval, digits, '+')}</i>"
    is_significant = interval.low > 0 or interval.high < 0
    if is_significant:
        return f"<td><b>{mean}</b> {ends}</td>"
    return f"<td class=open>{mean} {ends}</td>"


def html_table(caption: str, head: str, lines: Sequence[str]) -> str:
    """Table that scrolls horizontally if it is too wide."""
    caption_html = f"<caption>{escape_html(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table>{caption_html}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _interval_ends(interval: Interval, digits: int, sign: str = "") -> str:
    low, high = _signed(interval.low, digits, sign), _signed(interval.high, digits, sign)
    return f"[{low}, {high}]"


def _signed(value: float, digits: int, sign: str = "") -> str:
    """Number with a minus sign as wide as a plus sign."""
    return f"{value:{sign}.{digits}f}".replace("-", "&minus;")


def paper_table(paper: Paper, rows: Sequence[Row], names: Mapping[str, str]) -> Iterator[str]:
    """Comparison with a paper under one heading, and the differences. Values of policies without a
    row are left out.

    Args:
        rows: cells of the paper's study.
        names: labels of policies on the page.
    """
    models, policies = (dict.fromkeys(row[name] for row in rows) for name in ("model", "policy"))
    lines = [one for one in compare_with_paper(paper, rows) if one.reported.policy in policies]
    yield f"<section><h3>{escape_html(paper.cite)}</h3>"
    yield f"<p class=aside>The paper: {escape_html(paper.setup)}</p>"
    if lines:
        heads, cells = comparison_table(lines, list(models), names)
        head = "".join(f"<th scope=col>{escape_html(name)}</th>" for name in heads)
        yield html_table("", head, list(map(_line, cells)))
    if paper.differs:
        differs = "".join(f"<li>{escape_html(one)}</li>" for one in paper.differs)
        yield f"<p class=aside>What differs here:</p><ul class=aside>{differs}</ul>"
    yield "</section>"


def _line(cells: Sequence[str]) -> str:
    policy, *others = cells
    cells_html = "".join(f"<td>{escape_html(cell)}</td>" for cell in others)
    return f"<tr><th scope=row>{escape_html(policy)}</th>{cells_html}</tr>"
