"""What a paper reports beside what was measured here, as HTML (`larder.bench.beside`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from larder.bench.beside import beside, table
from larder.bench.papers import Paper
from larder.bench.rows import Row
from larder.plots.tables import html_table, markup


def paper_table(paper: Paper, rows: Sequence[Row], names: Mapping[str, str]) -> Iterator[str]:
    """A table under one heading, and what differs. Values of policies without a row are left out.

    Args:
        rows: cells of the paper's study.
        names: that policies have on the page.
    """
    models, policies = (dict.fromkeys(row[name] for row in rows) for name in ("model", "policy"))
    lines = [one for one in beside(paper, rows) if one.reported.policy in policies]
    yield f"<section><h3>{markup(paper.cite)}</h3>"
    yield f"<p class=aside>The paper: {markup(paper.setup)}</p>"
    if lines:
        heads, cells = table(lines, list(models), names)
        head = "".join(f"<th scope=col>{markup(name)}</th>" for name in heads)
        yield html_table("", head, list(map(_line, cells)))
    if paper.differs:
        differs = "".join(f"<li>{markup(one)}</li>" for one in paper.differs)
        yield f"<p class=aside>What differs here:</p><ul class=aside>{differs}</ul>"
    yield "</section>"


def _line(cells: Sequence[str]) -> str:
    policy, *others = cells
    told = "".join(f"<td>{markup(cell)}</td>" for cell in others)
    return f"<tr><th scope=row>{markup(policy)}</th>{told}</tr>"
