"""Tables of pages, written anew from committed rows.

    python -m larder_bench.reports.docs_tables README.md docs/results.md

fills what stands between marks of such a page. A mark names the study, and how its rows are shown:

    <!-- table: study=quality by=budget matched=tokens -->
    <!-- table: end -->

`by=budget` has a column per budget, over all tasks together, with intervals; `by=task` a column per
task and length, with the means at all budgets in each cell; `by=paper` has what the paper reports
beside ours, and what differs. `scale=` is a score of
`larder_bench.results.tables` (the first that the rows have unless given) or one of its times, in
milliseconds. `policies=a,b` shows those alone, `tasks=a,b` those tasks, by the start of their
spellings. Neither torch nor a model is loaded here.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from larder.core.errors import InputError
from larder.core.spelling import parse
from larder_bench.reports.paper_comparison import compare_with_paper
from larder_bench.reports.paper_comparison import comparison_table as beside_ours
from larder_bench.reports.study_index import RESULTS, study_command, wall_seconds
from larder_bench.results.budget_labels import WHOLE
from larder_bench.results.papers import Paper
from larder_bench.results.policy_labels import label_legend, policy_labels
from larder_bench.results.rows import Results, Row, read_results, rows_file
from larder_bench.results.tables import SCALES, TIMES, ScoreScale, ScoreTable, cell_scores
from larder_bench.studies.study import read_study

MARKED = re.compile(r"(<!-- table: (?!end)(.*?) -->\n)(?:.*?\n)??(<!-- table: end -->)", re.DOTALL)
OPTIONS = {"study": "", "by": "budget", "scale": "", "matched": "", "policies": "", "tasks": ""}
LESS_IS_BETTER = frozenset({"kl", *TIMES})
FULL = "full"
PAPER = "paper"
BAR = r"\|"  # inside a cell


@dataclass(frozen=True)
class TableMark:
    """Options of one table mark.

    Args:
        study: its name.
        by: a key of `TABLES`, or `paper`.
        scale: a key of `SCALES` or `TIMES`; empty for the first that the rows have.
        matched: `bytes`, `tokens` or `total`; empty for what the study names first.
        policies: names; empty for all.
        tasks: starts of spellings; empty for all.
    """

    study: str
    by: str = "budget"
    scale: str = ""
    matched: str = ""
    policies: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> TableMark:
        """Raises: InputError: an option is not known, or no study is named."""
        words = [word.partition("=") for word in shlex.split(text)]
        given = {name: value for name, _, value in words}
        if unknown := sorted(set(given) - set(OPTIONS)):
            raise InputError(f"A table has no option {unknown[0]!r}: take one of {list(OPTIONS)}.")
        one = OPTIONS | given
        if not one["study"] or one["by"] not in (*TABLES, PAPER):
            raise InputError(
                f"A table needs study=NAME, and by=budget, task or paper, not {text!r}."
            )
        return TableMark(
            study=one["study"],
            by=one["by"],
            scale=one["scale"],
            matched=one["matched"],
            policies=_split_names(one["policies"]),
            tasks=_split_names(one["tasks"]),
        )

    def rows(self, found: Results) -> list[Row]:
        """Those of the cells that it shows.

        Raises:
            InputError: there are none.
        """
        matched = self.matched or next((row["matched"] for row in found.cells), "")
        rows = [
            row
            for row in found.cells
            if row["policy"] == FULL or row["matched"] == matched
            if not self.policies or row["policy"] in self.policies
            if not self.tasks or row["task"].startswith(self.tasks)
        ]
        if not rows:
            raise InputError(f"No committed row of {self.study} is what a table asks for: {self}.")
        return rows


def replace_tables(page: str, folder: Path) -> str:
    """A page with all its tables as the rows of a folder have them."""
    return MARKED.sub(lambda mark: f"{mark[1]}{_table(mark[2], folder)}\n{mark[3]}", page)


def _table(mark: str, folder: Path) -> str:
    shown = TableMark.parse(mark)
    path = rows_file(folder, shown.study)
    if not path.is_file():
        return "\nNot measured yet with the bundled model.\n"
    found = read_results([path])
    rows = shown.rows(found)
    if shown.by == PAPER:
        lines = by_paper(rows, found.papers)
    else:
        lines = TABLES[shown.by](rows, shown.scale)
    told = ScoreTable([cell_scores(row) for row in rows]).counted().removesuffix(".")
    minutes = max(1, round(wall_seconds(path) / 60))
    asked = f"`{study_command(read_study(shown.study))}`"
    spelled = label_legend(policy_labels(row["policy"] for row in rows))
    return "\n".join(["", *lines, "", *spelled, f"{told}; {asked}, {minutes} min.", ""])


def by_budget(rows: Sequence[Row], key: str = "") -> list[str]:
    """A line per policy with a column per budget: means and intervals over all tasks."""
    table = ScoreTable([cell_scores(row) for row in rows])
    scale = _scale(table, key)
    budgets = _budgets(table)
    lines = [_line("policy", *budgets), _line(*["---"] * (1 + len(budgets)))]
    names = policy_labels(table.names) | {FULL: "full cache"}
    for name in _ranked_policies(table, scale):
        cells = [_cell(table, scale, name, budget, with_ends=True) for budget in budgets]
        if not any(cells):  # the full cache has a budget of its own
            cells = [_cell(table, scale, name, WHOLE, with_ends=True)] * len(budgets)
        lines.append(_line(names[name], *cells))
    return lines


def by_task(rows: Sequence[Row], key: str = "") -> list[str]:
    """A line per policy with a column per task: the means at all budgets, in their order."""
    groups = _by_task(rows)
    whole = ScoreTable([cell_scores(row) for row in rows])
    scale, budgets = _scale(whole, key), _budgets(whole)
    lines = [_line("policy", *groups), _line(*["---"] * (1 + len(groups)))]
    tables = [ScoreTable([cell_scores(row) for row in own]) for own in groups.values()]
    names = policy_labels(whole.names) | {FULL: "full cache"}
    for name in _ranked_policies(whole, scale):
        cells = []
        for table in tables:
            found = [_cell(table, scale, name, budget) for budget in table.budgets]
            cells.append(" ".join(cell for cell in found if cell))
        lines.append(_line(names[name], *cells))
    return [f"In each cell: {', '.join(budgets)}.", "", *lines] if len(budgets) > 1 else lines


def by_paper(rows: Sequence[Row], papers: Sequence[Row]) -> list[str]:
    """What a paper reports and ours, line by line, and what differs.

    Raises:
        InputError: the rows are of no paper's study.
    """
    if not papers:
        raise InputError("A table by=paper needs the study of a paper: take by=budget.")
    paper = Paper.of(papers[0])
    models, policies = (dict.fromkeys(row[name] for row in rows) for name in ("model", "policy"))
    known = [one for one in compare_with_paper(paper, rows) if one.reported.policy in policies]
    head, lines = beside_ours(known, list(models), policy_labels(policies))
    tasks = _task_names({row["task"] for row in rows})
    told = [[_with_short_names(cell, tasks) for cell in line] for line in lines]
    shown = [_line(*head), _line(*["---"] * len(head)), *(_line(*line) for line in told)]
    differs = "; ".join(paper.differs)
    above = [f"The paper: {paper.setup}", "", f"Here: {differs}." if differs else ""]
    return [*above, "", *(shown if lines else ())]


def _with_short_names(cell: str, names: Mapping[str, str]) -> str:
    for long, short in names.items():
        cell = cell.replace(long, short)
    return cell


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _by_task(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    lengths = {row["tokens"] for row in rows}
    names = _task_names({row["task"] for row in rows})
    groups: dict[str, list[Row]] = {}
    for row in rows:
        title = names[row["task"]] + (f", {row['tokens']:,}" if len(lengths) > 1 else "")
        groups.setdefault(title, []).append(row)
    return groups


def _task_names(spellings: Collection[str]) -> dict[str, str]:
    """Without the parameters that all tasks of a name have alike."""
    calls = {spelling: parse(spelling)[0] for spelling in spellings}
    names: dict[str, str] = {}
    for spelling, call in calls.items():
        others = [other.parameters for other in calls.values() if other.name == call.name]
        own = {
            key: value
            for key, value in call.parameters.items()
            if any(other.get(key) != value for other in others)
        }
        told = ", ".join(f"{key}={value}" for key, value in own.items())
        names[spelling] = f"{call.name}({told})" if own else call.name
    return names


def _scale(table: ScoreTable, key: str) -> ScoreScale:
    """Raises: InputError: the rows have no such number."""
    held = {scale.key: scale for scale in table.held(SCALES)}
    held |= {name: ScoreScale(name, TIMES[name], digits=1) for name in table.timed()}
    if key and key not in held:
        raise InputError(f"No row has {key!r}: take one of {list(held)}.")
    return held[key] if key else next(iter(held.values()))


def _budgets(table: ScoreTable) -> list[str]:
    """Studies with more than the full cache."""
    return [budget for budget in table.budgets if budget != WHOLE] or list(table.budgets)


def _ranked_policies(table: ScoreTable, scale: ScoreScale) -> list[str]:
    """The full cache, then the best first by the mean over all budgets."""
    sign = 1 if scale.key in LESS_IS_BETTER else -1

    def rank(name: str) -> tuple[bool, float]:
        found = [_mean(table, scale, name, budget) for budget in table.budgets]
        known = [value for value in found if value is not None]
        return name != FULL, sign * sum(known) / len(known) if known else float("inf")

    return sorted(table.names, key=rank)


def _mean(table: ScoreTable, scale: ScoreScale, name: str, budget: str) -> float | None:
    if scale.key in TIMES:
        seconds = table.seconds(name, budget).get(scale.key)
        return None if seconds is None else 1000 * seconds
    interval = table.interval(scale, name, budget)
    return None if interval is None else interval.mean


def _cell(
    table: ScoreTable, scale: ScoreScale, name: str, budget: str, with_ends: bool = False
) -> str:
    mean = _mean(table, scale, name, budget)
    if mean is None:
        return "refused" if table.refused(name, budget) else ""
    shown = f"{mean + 0.0:.{scale.digits}f}"
    interval = None if scale.key in TIMES else table.interval(scale, name, budget)
    if with_ends and interval is not None:
        shown += f" [{interval.low:.{scale.digits}f} {interval.high:.{scale.digits}f}]"
    return shown


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


TABLES = {"budget": by_budget, "task": by_task}


def main(paths: Sequence[Path]) -> None:
    """Write all tables of pages anew."""
    for path in paths:
        path.write_text(replace_tables(path.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
