"""Tables of a group of cells as HTML: means with intervals, and paired differences to baselines.

The numbers are those of the tables that `larder bench` prints (`larder.bench.tables`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from larder.bench.amounts import OWN, WHOLE
from larder.bench.bootstrap import Interval
from larder.bench.rows import Row
from larder.bench.tables import SCALES, TIMES, Scale, Table, entry
from larder.plots.looks import FULL, short


def group_tables(title: str, rows: Sequence[Row], bases: Sequence[str]) -> Iterator[str]:
    """Tables of every score that the cells have, under one heading."""
    table = Table([entry(row) for row in rows])
    yield f"<section><h3>{markup(title)}</h3><p class=aside>{markup(table.counted())}</p>"
    if why := [line.removeprefix("- ") for line in table.refusals() if line]:
        yield f"<ul class=aside>{''.join(f'<li>{markup(line)}</li>' for line in why)}</ul>"
    for scale in table.held(SCALES):
        yield _means(table, scale)
        for base in bases:
            if base in table.names:
                yield from _differences(table, scale, base)
    yield from _times(table)
    yield "</section>"


def markup(text: str) -> str:
    """Text that stays text wherever it stands on the page, in ASCII."""
    return escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _times(table: Table) -> Iterator[str]:
    """What was timed, a line per policy and budget."""
    if not (timed := table.timed()):
        return
    head = "".join(f"<th scope=col>{TIMES[name]}</th>" for name in timed)
    lines: list[str] = []
    for name in table.names:
        for budget in table.budgets:
            if took := table.seconds(name, budget):
                cells = "".join(f"<td>{took[t]:.4f}</td>" if t in took else "<td>" for t in timed)
                place = f"<th scope=row>{markup(short(name))}</th><td>{markup(budget)}</td>"
                lines.append(f"<tr>{place}{cells}</tr>")
    shown = html_table("", f"<th scope=col>policy</th><th scope=col>budget</th>{head}", lines)
    if table.held(SCALES):
        shown = f"<details><summary>Seconds</summary>{shown}</details>"
    yield shown


def _means(table: Table, scale: Scale) -> str:
    """A line per policy; below each mean its interval, the bytes it took as a share, and its
    budget in tokens per kv head.

    Budgets that only the full cache has, or a policy with a size of its own, are no column: what
    stands there goes across all.
    """
    columns = [budget for budget in table.budgets if budget not in (WHOLE, OWN)]
    columns = columns or list(table.budgets)
    head = "".join(f"<th scope=col>{markup(budget)}</th>" for budget in columns)
    lines = []
    for name in table.names:
        alone = [b for b in table.budgets if b not in columns and _has(table, scale, name, b)]
        cells = [_mean(table, scale, name, budget) for budget in columns]
        if alone:
            cells = [_mean(table, scale, name, alone[0], len(columns))]
        lines.append(f"<tr><th scope=row>{markup(short(name))}</th>{''.join(cells)}</tr>")
    return html_table(scale.title, f"<th scope=col>policy</th>{head}", lines)


def _has(table: Table, scale: Scale, name: str, budget: str) -> bool:
    return table.interval(scale, name, budget) is not None or table.refused(name, budget) > 0


def _mean(table: Table, scale: Scale, name: str, budget: str, across: int = 1) -> str:
    interval, refused = table.interval(scale, name, budget), table.refused(name, budget)
    start = f"<td colspan={across}" if across > 1 else "<td"
    if interval is None:
        return f"{start} class=none>{'refused' if refused else ''}</td>"
    note = f", {refused} refused" if refused else ""
    tokens = f", {table.budget_tokens(name, budget):,} tokens" if budget != WHOLE else ""
    share = f"bytes {table.shares(name, budget)}{tokens}{note}"
    shown = _signed(interval.mean, scale.digits)
    ends = _ends(interval, scale.digits)
    return f"{start}><b>{shown}</b> <i>{ends}</i><small>{share}</small></td>"


def _differences(table: Table, scale: Scale, base: str) -> Iterator[str]:
    budgets = [b for b in table.budgets if table.interval(scale, base, b) is not None]
    if not budgets:
        return
    lines = []
    for name in table.names:
        if name in (base, FULL):
            continue
        found = [table.difference(scale, name, base, budget) for budget in budgets]
        if any(interval is not None for interval in found):
            cells = "".join(_difference(interval, scale.digits) for interval in found)
            lines.append(f"<tr><th scope=row>{markup(short(name))}</th>{cells}</tr>")
    if lines:
        head = "".join(f"<th scope=col>{markup(budget)}</th>" for budget in budgets)
        title = f"{scale.title}: difference to {short(base)}, pair by pair"
        shown = html_table("", f"<th scope=col>policy</th>{head}", lines)
        yield f"<details><summary>{markup(title)}</summary>{shown}</details>"


def _difference(interval: Interval | None, digits: int) -> str:
    if interval is None:
        return "<td class=none></td>"
    shown = f"{_signed(interval.mean, digits, '+')}"
    ends = f"<i>{_ends(interval, digits, '+')}</i>"
    is_told = interval.low > 0 or interval.high < 0
    return f"<td><b>{shown}</b> {ends}</td>" if is_told else f"<td class=open>{shown} {ends}</td>"


def html_table(caption: str, head: str, lines: Sequence[str]) -> str:
    """A table that can be moved sideways where it is too wide."""
    told = f"<caption>{markup(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table>{told}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _ends(interval: Interval, digits: int, sign: str = "") -> str:
    low, high = _signed(interval.low, digits, sign), _signed(interval.high, digits, sign)
    return f"[{low}, {high}]"


def _signed(value: float, digits: int, sign: str = "") -> str:
    """A number with a minus sign that is as wide as a plus sign."""
    return f"{value:{sign}.{digits}f}".replace("-", "&minus;")
