"""Generator of docs/methods.md: published systems, what Larder has of each, and figures.

    python -m larder_bench.reports.methods docs/methods.md

fills the space between the marks of the page from `docs/methods.toml` beside it, which names the
state of every system and the presets that are it. Sentences and papers are those of the presets,
figures those of committed rows of SmolLM2 (`FIGURES`). No model is loaded here.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from larder.cli.part_docs import Citation, find_part, part_names, preset_doc
from larder.core import InputError
from larder.session import PRESETS
from larder_bench.reports.study_index import RESULTS, replace_between
from larder_bench.results.budget_labels import WHOLE
from larder_bench.results.rows import read_results, rows_file
from larder_bench.results.tables import SCALES, ItemScale, ScoreTable
from larder_bench.results.toml_tables import convert_table

SOURCE = "methods.toml"
BEGIN, END = "<!-- methods: begin -->", "<!-- methods: end -->"
# Area -> its heading, in the order of the page.
AREAS = {
    "policy": "Policies of one engine",
    "baseline": "Policies that these compare with, or that users of other tools look for",
    "learned": "Small modules trained on a frozen model",
    "reuse": "Storage, reuse across requests, serving",
    "evaluation": "Benchmarks, surveys, cost models, audits",
    "trained": "Methods that train the language model itself",
    "outside": "Other fields",
}
STATES = ("built", "partial", "missing", "measured", "outside")
SHARES = ("1/4", "1/8")
CATALOGUE = ("catalogue", "catalogue_recall", "presets_needles")
# Beginnings of what was seen of a paper's behavior; methods of these areas need one.
VERDICTS = ("Seen", "Partly seen", "Not seen", "Not measured", "Control")
JUDGED = ("policy", "baseline", "learned", "reuse")


@dataclass(frozen=True)
class FigureColumn:
    """Column of figures: the rows of the first of the studies that has the policy.

    Args:
        title: head of the column.
        studies: names of the studies.
        scale: key of the score in `SCALES`.
        task: start of the spelling of the task.
        budgets: shares of the bytes or entries, one figure for each that was measured.
        question: place of the question.
    """

    title: str
    studies: tuple[str, ...]
    scale: str
    task: str
    budgets: tuple[str, ...] = ("1/4",)
    question: str = "after"


COSTS, FULL = "catalogue_cost", "full"
FIGURES = (
    FigureColumn("needles after", ("ruler",), "own", "needles"),
    FigureColumn(
        "needles inside", ("ruler_inside",), "exact", "needles", ("20%",), question="inside"
    ),
    FigureColumn("nats", ("divergence",), "kl", "locomo"),
    FigureColumn("likelihood after", CATALOGUE, "log_likelihood", "needles", SHARES),
    FigureColumn(
        "likelihood inside",
        ("catalogue_inside",),
        "log_likelihood",
        "needles",
        SHARES,
        question="inside",
    ),
)


@dataclass(frozen=True)
class PublishedMethod:
    """Published system, and how much of it is built.

    Args:
        name: name in its paper.
        area: key of `AREAS`.
        state: one of `STATES`.
        presets: names of presets, the paper's method first.
        parts: names of parts, where no preset is the method.
        paper: arXiv id of the one among the cited papers, where rarity does not tell; `none` for a
            control without a paper.
        measured: policy that the figures are of, where no preset is the method.
        elsewhere: where it lives outside the policy language, in Markdown.
        behavior: whether the paper's behavior was seen, beginning with one of `VERDICTS`.
        note: what is missing or differs, or why it is outside.

    Raises:
        InputError: area, state, a preset or a part is unknown, a built method names none, or a
            method that is there does not say what was seen of it.
    """

    name: str
    area: str
    state: str
    presets: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    paper: str = ""
    measured: str = ""
    elsewhere: str = ""
    behavior: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        unknown = [
            *(() if self.area in AREAS else (self.area,)),
            *(() if self.state in STATES else (self.state,)),
            *(set(self.presets) - set(PRESETS)),
            *(set(self.parts) - set(part_names())),
        ]
        if unknown:
            raise InputError(f"{SOURCE}: {self.name} names {unknown[0]!r}, which is not known.")
        if self.state == "built" and not (self.presets or self.parts or self.elsewhere):
            raise InputError(f"{SOURCE}: {self.name} is built, so presets or parts must be named.")
        is_judged = self.area in JUDGED and self.state in ("built", "partial")
        if is_judged and not self.behavior.startswith(VERDICTS):
            raise InputError(
                f"{SOURCE}: {self.name} needs a behavior that begins with one of "
                f"{', '.join(VERDICTS)}."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Policies that its figures are of."""
        return self.presets or ((self.measured,) if self.measured else ())

    def where(self) -> str:
        """Sentence of its first preset, names of the others, or its parts."""
        if not self.presets:
            parts = self.elsewhere or ", ".join(f"`{name}()`" for name in self.parts)
            return f"{parts}; figures of `{self.measured}`" if self.measured else parts
        first, *others = self.presets
        also = f"; also {', '.join(f'`{name}`' for name in others)}" if others else ""
        return f"`{first}`: `{PRESETS[first]}`{also}"

    def cited(self) -> str:
        """The paper: of those that its parts cite, the one that fewest presets cite."""
        cited = cited_by(self.presets[0]) if self.presets else ()
        cited = cited or tuple(one for name in self.parts for one in find_part(name).citations)
        if self.paper:
            cited = tuple(one for one in cited if one.arxiv == self.paper)
        uses = _uses_of_papers()
        return min(cited, key=lambda one: uses[one.short]).short if cited else ""


def cited_by(preset: str) -> tuple[Citation, ...]:
    """Papers that the parts of a preset cite."""
    return tuple(one for part in preset_doc(preset).parts for one in part.citations)


@cache
def _uses_of_papers() -> Counter[str]:
    papers = [{one.short for one in cited_by(name)} for name in PRESETS]
    return Counter(paper for named in papers for paper in named)


def read_methods(path: Path) -> list[PublishedMethod]:
    """Methods of a file.

    Raises:
        InputError: a method is not valid, or a name stands twice.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["method"]
    methods = [convert_table(table, PublishedMethod, str(path)) for table in tables]
    names = [method.name for method in methods]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}: {twice[0]} stands twice; a method has one table.")
    return methods


@cache
def _scores(study: str, task: str, question: str) -> ScoreTable:
    rows = read_results([rows_file(RESULTS, study)]).cells
    shown = [r for r in rows if r["task"].startswith(task) and r["question"] == question]
    return ScoreTable(shown)


def figure_text(figure: FigureColumn, names: Sequence[str]) -> str:
    """Means at the budgets of the first of these policies that has rows; empty if none has."""
    scale = next(scale for scale in SCALES if scale.key == figure.scale)
    for name in names:
        for study in figure.studies:
            table = _scores(study, figure.task, figure.question)
            cells = [_cell(table, scale, name, budget) for budget in (WHOLE, *figure.budgets)]
            if found := list(filter(None, cells)):
                return ", ".join(found)
    return ""


def _cell(table: ScoreTable, scale: ItemScale, name: str, budget: str) -> str:
    if table.refused(name, budget):
        return "refused"
    interval = table.interval(scale, name, budget)
    return "" if interval is None else f"{interval.mean + 0.0:.{scale.digits}f}"


@cache
def _costs() -> dict[str, tuple[float, float]]:
    """Seconds of reading and of a step, by policy."""
    rows = read_results([rows_file(RESULTS, COSTS)]).measured
    return {row["policy"]: (row["prefill_seconds"], 1 / row["tokens_per_second"]) for row in rows}


def cost_text(names: Sequence[str]) -> str:
    """Times of reading and of a step as multiples of the full cache's; empty without rows."""
    costs = _costs()
    known = next((costs[name] for name in names if name in costs), ())
    pairs = zip(known, costs[FULL], strict=False)
    return ", ".join(f"{part / full:.1f}" for part, full in pairs)


def method_lines(methods: Sequence[PublishedMethod]) -> Iterator[str]:
    """Markdown of all areas: a count of states, and a table for each area."""
    for area, heading in AREAS.items():
        members = [method for method in methods if method.area == area]
        counts = [f"{sum(m.state == s for m in members)} {s}" for s in STATES]
        yield from ("", f"## {heading}", "")
        shown = [count for count in counts if not count.startswith("0 ")]
        yield f"{len(members)} systems: {', '.join(shown)}."
        yield ""
        if area in ("trained", "outside", "evaluation"):
            yield from _short_table(members)
        else:
            yield from _full_table(members)


def _short_table(members: Sequence[PublishedMethod]) -> Iterator[str]:
    yield from ("| system | state | |", "|---|---|---|")
    for method in members:
        text = "; ".join(filter(None, (method.elsewhere, method.note)))
        yield f"| {method.name} | {method.state} | {text} |"


def _full_table(members: Sequence[PublishedMethod]) -> Iterator[str]:
    titles = [*(figure.title for figure in FIGURES), "cost"]
    yield f"| system | paper | in Larder | state | paper's behavior | {' | '.join(titles)} | |"
    yield "|" + "---|" * (6 + len(titles))
    for method in members:
        figures = [figure_text(figure, method.names) for figure in FIGURES]
        head = method.name, method.cited(), method.where(), method.state, method.behavior
        cells = *head, *figures, cost_text(method.names), method.note
        yield f"| {' | '.join(cells)} |"


def replace_methods(text: str, methods: Sequence[PublishedMethod]) -> str:
    """Page with other tables between its marks.

    Raises:
        InputError: the page has no marks.
    """
    return replace_between(text, BEGIN, END, [*method_lines(methods), ""])


def main(path: Path) -> None:
    """Write the tables of a page from the file beside it."""
    methods = read_methods(path.parent / SOURCE)
    page = replace_methods(path.read_text(encoding="utf-8"), methods)
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
