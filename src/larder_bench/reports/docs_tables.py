"""Generator of the tables in documentation pages, from committed rows.

    python -m larder_bench.reports.docs_tables README.md docs/results.md

fills the space between the marks of a page. A mark names the study, and the layout of its rows:

    <!-- table: study=quality by=budget matched=tokens -->
    <!-- table: end -->

`by=budget` has a column per budget, over all tasks together, with intervals; `by=task` a column per
task and length, with the means at all budgets in each cell; `by=paper` has the values that the
paper reports next to the measured ones, and the differences; `by=difference pairs=a/b` has the
paired difference of a less b, with its interval over the texts; `by=random` lists the policies
whose paired interval against random entries lies below, around or above zero. `scale=` is a score
of `larder_bench.results.tables` (by default the first that the rows have) or one of its times, in
milliseconds. `policies=a,b` selects policies, `tasks=a,b` tasks, by the start of their spellings.
Neither torch nor a model is loaded here.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from larder.core import InputError, parse
from larder.evaluation import Interval
from larder_bench.reports.paper_comparison import compare_with_paper
from larder_bench.reports.paper_comparison import comparison_table as beside_ours
from larder_bench.reports.study_index import RESULTS, study_command, wall_seconds
from larder_bench.results.budget_labels import WHOLE
from larder_bench.results.papers import Paper
from larder_bench.results.policy_labels import label_legend, policy_labels
from larder_bench.results.rows import Results, Row, read_results, rows_file
from larder_bench.results.tables import SCALES, TIMES, ItemScale, ScoreTable
from larder_bench.studies.study import read_study

MARKED = re.compile(r"(<!-- table: (?!end)(.*?) -->\n)(?:.*?\n)??(<!-- table: end -->)", re.DOTALL)
OPTIONS = {
    "study": "",
    "by": "budget",
    "scale": "",
    "matched": "",
    "policies": "",
    "tasks": "",
    "pairs": "",
}
LESS_IS_BETTER = frozenset({"kl", *TIMES})
FULL = "full"
PAPER = "paper"
DIFFERENCE = "difference"
RANDOM = "random"  # the control of random entries
BAR = r"\|"  # inside a cell


@dataclass(frozen=True)
class TableMark:
    """Options of one table mark.

    Args:
        study: name of the study.
        by: key of `TABLES`, or `paper`.
        scale: key of `SCALES` or `TIMES`; empty for the first that the rows have.
        matched: `bytes`, `tokens` or `total`; empty for the first one of the study.
        policies: names of policies; empty for all.
        tasks: starts of task spellings; empty for all.
        pairs: names of two policies with a stroke between, for `by=difference`.
    """

    study: str
    by: str = "budget"
    scale: str = ""
    matched: str = ""
    policies: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> TableMark:
        """Options of a mark's text.

        Raises:
            InputError: an option is unknown, or no study is named.
        """
        words = [word.partition("=") for word in shlex.split(text)]
        options = {name: value for name, _, value in words}
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise InputError(f"A table has no option {unknown[0]!r}: take one of {list(OPTIONS)}.")
        options = OPTIONS | options
        if not options["study"] or options["by"] not in (*TABLES, PAPER, DIFFERENCE):
            raise InputError(
                f"A table needs study=NAME, and by=budget, task, random, paper or difference, not "
                f"{text!r}."
            )
        return TableMark(
            study=options["study"],
            by=options["by"],
            scale=options["scale"],
            matched=options["matched"],
            policies=_split_names(options["policies"]),
            tasks=_split_names(options["tasks"]),
            pairs=_split_names(options["pairs"]),
        )

    def rows(self, results: Results) -> list[Row]:
        """Rows of the cells that the table shows.

        Raises:
            InputError: there are none.
        """
        matched = self.matched or next((row["matched"] for row in results.cells), "")
        rows = [
            row
            for row in results.cells
            if row["policy"] == FULL or row["matched"] == matched
            if not self.policies or row["policy"] in self.policies
            if not self.tasks or row["task"].startswith(self.tasks)
        ]
        if not rows:
            raise InputError(f"No committed row of {self.study} matches a table: {self}.")
        return rows


def replace_tables(page: str, folder: Path) -> str:
    """Page with all its tables generated from the rows of a folder."""
    return MARKED.sub(lambda mark: f"{mark[1]}{_table(mark[2], folder)}\n{mark[3]}", page)


def _table(mark: str, folder: Path) -> str:
    options = TableMark.parse(mark)
    path = rows_file(folder, options.study)
    if not path.is_file():
        return "\nNot measured yet with the bundled model.\n"
    results = read_results([path])
    rows = options.rows(results)
    if options.by == PAPER:
        lines = by_paper(rows, results.papers)
    elif options.by == DIFFERENCE:
        lines = by_difference(rows, options.scale, options.pairs)
    else:
        lines = TABLES[options.by](rows, options.scale)
    counts = ScoreTable(rows).count_label().removesuffix(".")
    minutes = max(1, round(wall_seconds(path) / 60))
    command = f"`{study_command(read_study(options.study))}`"
    legend = label_legend(policy_labels(row["policy"] for row in rows))
    return "\n".join(["", *lines, "", *legend, f"{counts}; {command}, {minutes} min.", ""])


def by_budget(rows: Sequence[Row], key: str = "") -> list[str]:
    """Table with a line per policy and a column per budget: means and intervals over all tasks."""
    table = ScoreTable(rows)
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
    """Table with a line per policy and a column per task: the means at all budgets, in order."""
    groups = _by_task(rows)
    whole = ScoreTable(rows)
    scale, budgets = _scale(whole, key), _budgets(whole)
    lines = [_line("policy", *groups), _line(*["---"] * (1 + len(groups)))]
    tables = [ScoreTable(group) for group in groups.values()]
    names = policy_labels(whole.names) | {FULL: "full cache"}
    for name in _ranked_policies(whole, scale):
        cells = []
        for table in tables:
            means = [_cell(table, scale, name, budget) for budget in table.budgets]
            cells.append(" ".join(cell for cell in means if cell))
        lines.append(_line(names[name], *cells))
    return [f"In each cell: {', '.join(budgets)}.", "", *lines] if len(budgets) > 1 else lines


def by_paper(rows: Sequence[Row], papers: Sequence[Row]) -> list[str]:
    """Table of a paper's values and the measured ones, line by line, and the differences.

    Raises:
        InputError: the study of the rows has no paper.
    """
    if not papers:
        raise InputError("A table by=paper needs the study of a paper: take by=budget.")
    paper = Paper.of(papers[0])
    models, policies = (dict.fromkeys(row[name] for row in rows) for name in ("model", "policy"))
    known = [one for one in compare_with_paper(paper, rows) if one.reported.policy in policies]
    head, lines = beside_ours(known, list(models), policy_labels(policies))
    tasks = _task_names({row["task"] for row in rows})
    short_lines = [[_with_short_names(cell, tasks) for cell in line] for line in lines]
    table = [_line(*head), _line(*["---"] * len(head)), *(_line(*line) for line in short_lines)]
    differs = "; ".join(paper.differs)
    heading = [f"The paper: {paper.setup}", "", f"Here: {differs}." if differs else ""]
    return [*heading, "", *(table if lines else ())]


def by_difference(rows: Sequence[Row], key: str, pairs: Sequence[str]) -> list[str]:
    """Table with a line per pair of policies: the paired difference and its interval by budget.

    Raises:
        InputError: a pair is not two names of the rows.
    """
    table = ScoreTable(rows)
    scale, budgets = _scale(table, key), _budgets(table)
    lines = [_line("difference", *budgets), _line(*["---"] * (1 + len(budgets)))]
    for pair in pairs:
        first, _, second = pair.partition("/")
        if not {first, second} <= set(table.names):
            raise InputError(f"{pair!r} is not FIRST/SECOND, two policies of the rows.")
        found = [table.difference(scale, first, second, budget) for budget in budgets]
        lines.append(_line(f"{first} less {second}", *[_signed(one, scale) for one in found]))
    return lines


def by_random(rows: Sequence[Row], key: str = "") -> list[str]:
    """Table of the policies that are worse than random entries, no better, and better, by budget;
    in each cell the farthest from random entries comes first, the nearest in the middle group.

    Raises:
        InputError: the rows have no random entries.
    """
    table = ScoreTable(rows)
    scale, budgets = _scale(table, key), _budgets(table)
    if RANDOM not in table.names:
        raise InputError("A table by=random needs rows of the control random.")
    found = [_beside_random(table, scale, budget) for budget in budgets]
    lines = [_line("beside random entries", *budgets), _line(*["---"] * (1 + len(budgets)))]
    for group in ("worse", "no better", "better"):
        lines.append(_line(group, *[", ".join(f"`{n}`" for n in one[group]) for one in found]))
    return lines


def _beside_random(table: ScoreTable, scale: ItemScale, budget: str) -> dict[str, list[str]]:
    """Policies by the sign of their paired interval, each group by the size of the difference."""
    sign = -1 if scale.key in LESS_IS_BETTER else 1
    groups: dict[str, list[tuple[float, str]]] = {"worse": [], "no better": [], "better": []}
    for name in table.names:
        interval = table.difference(scale, name, RANDOM, budget)
        if name in (FULL, RANDOM) or interval is None:
            continue
        ends = sorted((sign * interval.low, sign * interval.high))
        group = "better" if ends[0] > 0 else "worse" if ends[1] < 0 else "no better"
        groups[group].append((sign * interval.mean, name))
    return {
        group: [name for _, name in sorted(named, reverse=group != "worse")]
        for group, named in groups.items()
    }


def _signed(interval: Interval | None, scale: ItemScale) -> str:
    if interval is None:
        return ""
    mean, low, high = (x + 0.0 for x in (interval.mean, interval.low, interval.high))
    return f"{mean:+.{scale.digits}f} [{low:+.{scale.digits}f} {high:+.{scale.digits}f}]"


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
    """Names of tasks without the parameters that are equal for all tasks of a name."""
    calls = {spelling: parse(spelling)[0] for spelling in spellings}
    names: dict[str, str] = {}
    for spelling, call in calls.items():
        others = [other.parameters for other in calls.values() if other.name == call.name]
        differing = {
            key: value
            for key, value in call.parameters.items()
            if any(other.get(key) != value for other in others)
        }
        parameters = ", ".join(f"{key}={value}" for key, value in differing.items())
        names[spelling] = f"{call.name}({parameters})" if differing else call.name
    return names


def _scale(table: ScoreTable, key: str) -> ItemScale:
    """Scale of a table.

    Raises:
        InputError: the rows have no such number.
    """
    scales = {scale.key: scale for scale in table.scales_with_data(SCALES)}
    scales |= {name: ItemScale(name, TIMES[name], digits=1) for name in table.timed_fields()}
    if key and key not in scales:
        raise InputError(f"No row has {key!r}: take one of {list(scales)}.")
    return scales[key] if key else next(iter(scales.values()))


def _budgets(table: ScoreTable) -> list[str]:
    """Budgets of a table without that of the full cache, unless it is the only one."""
    return [budget for budget in table.budgets if budget != WHOLE] or list(table.budgets)


def _ranked_policies(table: ScoreTable, scale: ItemScale) -> list[str]:
    """Policies, the full cache first, then the best by the mean over all budgets."""
    sign = 1 if scale.key in LESS_IS_BETTER else -1

    def rank(name: str) -> tuple[bool, float]:
        means = [_mean(table, scale, name, budget) for budget in table.budgets]
        known = [value for value in means if value is not None]
        return name != FULL, sign * sum(known) / len(known) if known else float("inf")

    return sorted(table.names, key=rank)


def _mean(table: ScoreTable, scale: ItemScale, name: str, budget: str) -> float | None:
    if scale.key in TIMES:
        seconds = table.seconds(name, budget).get(scale.key)
        return None if seconds is None else 1000 * seconds
    interval = table.interval(scale, name, budget)
    return None if interval is None else interval.mean


def _cell(
    table: ScoreTable, scale: ItemScale, name: str, budget: str, with_ends: bool = False
) -> str:
    mean = _mean(table, scale, name, budget)
    if mean is None:
        return "refused" if table.refused(name, budget) else ""
    text = f"{mean + 0.0:.{scale.digits}f}"
    interval = None if scale.key in TIMES else table.interval(scale, name, budget)
    if with_ends and interval is not None:
        text += f" [{interval.low:.{scale.digits}f} {interval.high:.{scale.digits}f}]"
    return text


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


TABLES = {"budget": by_budget, "task": by_task, RANDOM: by_random}


def main(paths: Sequence[Path]) -> None:
    """Regenerate all tables of pages."""
    for path in paths:
        path.write_text(replace_tables(path.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
