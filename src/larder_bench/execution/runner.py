"""Run a study: every cell that its file does not hold yet, a model after the other.

What a cell comes to depends on nothing that happened before it in this process, so that a study
that was stopped and taken up again has the rows of one that was not. The first guess at a budget in
bytes is what the first seed came to, which is always in the file by then. What comes to the same at
equal bytes and equal tokens, such as the full cache, is measured once and has a row of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from larder.core.errors import InputError, SpellingError, UsageError
from larder.core.family import Family
from larder.core.spelling import build, parse, spell
from larder_bench.datasets.conversation_file import conversation_digest
from larder_bench.execution.measured_cells import MeasuredCells
from larder_bench.execution.resumable_run import (
    JobExecutor,
    ProgressCallback,
    ResumableRun,
    estimate_seconds,
    ignore_progress,
    run_in_order,
)
from larder_bench.measures.base import Measure
from larder_bench.results.environment import environment_row
from larder_bench.results.papers import Paper, paper_budget
from larder_bench.results.rows import (
    TEXT_DIGEST_KEY,
    Row,
    append_rows,
    cell_key,
    existing_rows,
    read_results,
)
from larder_bench.studies.cells import Cell, cells_of, distinct_cells, short_spelling
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.study import Study
from larder_bench.tasks.base import parse_task

MEASURES = Family("measure", "larder_bench.measures")
CostGroup = tuple[str, str, str, str, str]  # model, task, length, measure, policy
ContextLoader = Callable[[str], ModelContext]  # loads the model of that name
# How the cells of a model are gone through, given its name, the rows that are known of them, and
# whom to tell of other surroundings.
ExecutionStrategy = Callable[[str, Sequence[Row], Callable[[Row], None]], JobExecutor[Cell]]


def run_locally(model: str, rows: Sequence[Row], tell: Callable[[Row], None]) -> JobExecutor[Cell]:
    """One after the other, in this process."""
    del model, rows, tell
    return run_in_order


def parse_measure(sentence: str) -> Measure:
    """A measure as it is written.

    Raises:
        LarderError: there is none, or it has no such parameter.
    """
    calls = parse(sentence, "measure")
    if len(calls) != 1:
        raise SpellingError(f"{sentence!r} is not one measure: write name(parameter=value).")
    return build(MEASURES.load(calls[0].name), calls[0].parameters)


def validate_study(study: Study) -> list[Cell]:
    """All cells, before any work starts, so that a name that nobody knows is told at once.

    Raises:
        LarderError: something in the study does not exist.
    """
    cells = [
        cell for model in dict.fromkeys(study.models) for cell in _cells_of_model(study, model)
    ]
    _check_paper(study, cells)
    return cells


@dataclass(frozen=True)
class StudyRunner:
    """A study on its way.

    Args:
        out: the file of its results.
        open: gives the workbench of a model.
        threads: that torch computes with.
        execution: how cells are gone through.
    """

    study: Study
    out: Path
    open: ContextLoader
    threads: int
    execution: ExecutionStrategy = run_locally
    _told: dict[str, Row] = field(default_factory=dict[str, Row], init=False, compare=False)

    def go(self, tell: ProgressCallback = ignore_progress) -> None:
        """Measure what is missing.

        Raises:
            LarderError: a model cannot be loaded, or something in the study does not exist.
        """
        for bench, surroundings, run in self._runs():
            left = run.left()
            _build_conversations(bench, left)
            _check_texts(bench, left, self._of(run.jobs[0].model, self._known()), self.out)
            if left:
                self._tell_surroundings(surroundings)
            self._tell_paper()
            run.go(tell)

    def estimate(self) -> dict[CostGroup, float]:
        """Seconds by model, task, length, measure and policy, from one cell of each.

        Raises:
            LarderError: as `go`.
        """
        found: dict[CostGroup, float] = {}
        for model in self.study.models:
            bench = self.open(model)
            cells = distinct_cells(self._cells[model])
            _build_conversations(bench, cells)
            found |= estimate_seconds(
                cells, _cost_group, lambda cell, bench=bench: _measure_uncached(bench, cell, None)
            )
        return found

    def rows(self) -> list[Row]:
        """The cells that were asked for and that the file holds, of the models opened so far."""
        known = self._known()
        return [row for model in self._told for row in self._of(model, known)]

    def others(self) -> int:
        """Number of other cells in the file, of other runs and studies."""
        return len(self._known()) - len(self.rows())

    @cached_property
    def _cells(self) -> dict[str, list[Cell]]:
        return {model: _cells_of_model(self.study, model) for model in self.study.models}

    def _of(self, model: str, rows: Sequence[Row]) -> list[Row]:
        """Selected cells of a model."""
        asked = {cell_key(cell.head(self._told[model])) for cell in self._cells[model]}
        return [row for row in rows if cell_key(row) in asked]

    def paper(self) -> Paper | None:
        """What a paper reports, tasks and measures spelled as rows have them."""
        return None if self.study.paper is None else _canonical_paper(self.study.paper)

    def _tell_paper(self) -> None:
        """Have the file hold what a paper reports, as it is written now."""
        if (paper := self.paper()) is not None:
            row = paper.row(self.study.name)
            known = read_results([self.out]).papers if self.out.exists() else ()
            if row not in known:
                append_rows(self.out, [row])

    def _known(self) -> list[Row]:
        return list(read_results([self.out]).cells) if existing_rows(self.out) else []

    def _runs(self) -> Iterator[tuple[ModelContext, Row, ResumableRun[Cell]]]:
        for model in self.study.models:
            bench = self.open(model)
            self._told[model] = told = bench.told()
            surroundings = environment_row(self.threads, bench.accelerator())
            rows = self._of(model, self._known())
            known = MeasuredCells(rows)

            def measure(
                cell: Cell, bench: ModelContext = bench, known: MeasuredCells = known
            ) -> Row:
                return measure_cell(bench, known, cell)

            def head(cell: Cell, told: Row = told | {"environment": surroundings["id"]}) -> Row:
                return cell.head(told)

            each = self.execution(model, rows, self._tell_surroundings)
            told_of = self._cells[model], head, cell_key, measure, self.out, {}, each
            yield bench, surroundings, ResumableRun(*told_of)

    def _tell_surroundings(self, surroundings: Row) -> None:
        """Have the file hold them."""
        if not any(row.get("id") == surroundings["id"] for row in existing_rows(self.out)):
            append_rows(self.out, [surroundings])


def _cost_group(cell: Cell) -> CostGroup:
    """Key of cells with about the same duration."""
    task, length, *_ = cell.place
    return cell.model, task, length, cell.measure, cell.subject.name


def _build_conversations(bench: ModelContext, cells: Sequence[Cell]) -> None:
    """Make one conversation of each kind: that a source is missing is no policy's refusal.

    Raises:
        LarderError: a task cannot be made.
    """
    for cell in {cell.place[:2]: cell for cell in reversed(cells)}.values():
        bench.conversation(cell.task, cell.seed, cell.tokens)


def _check_texts(bench: ModelContext, left: Sequence[Cell], rows: Sequence[Row], out: Path) -> None:
    """Make one conversation of each kind again, so that a file holds rows of one text alone.

    Raises:
        InputError: rows are of other texts than those that are left to measure.
    """
    cells = {(spell(cell.task), cell.tokens): cell for cell in left}
    told = {(row["task"], row["tokens"]): row for row in rows if TEXT_DIGEST_KEY in row}
    for kind in cells.keys() & told.keys():
        cell, row = cells[kind], told[kind]
        if (
            conversation_digest(bench.conversation(cell.task, row["seed"], cell.tokens))
            != row[TEXT_DIGEST_KEY]
        ):
            raise InputError(
                f"{out} holds rows of {row['task']} that were measured on other texts: name the "
                "--corpus and --data of then, or another --out."
            )


def measure_cell(bench: ModelContext, known: MeasuredCells, cell: Cell) -> Row:
    """Result row of a cell."""
    row = known.shared_row(cell) or _measure_uncached(bench, cell, known.guess(cell))
    known.learn(cell, row)
    return row


def _measure_uncached(bench: ModelContext, cell: Cell, guess: float | None) -> Row:
    measured = parse_measure(cell.measure).measure(bench, cell, guess)
    return measured | {
        TEXT_DIGEST_KEY: conversation_digest(bench.conversation(cell.task, cell.seed, cell.tokens))
    }


def _check_paper(study: Study, cells: Sequence[Cell]) -> None:
    """Raises: UsageError: a value is of a policy at a budget that it is not run at."""
    run = {(cell.subject.name, cell.budget) for cell in cells}
    for value in study.paper.values if study.paper is not None else ():
        if (value.policy, value.budget) not in run:
            known = [paper_budget(budget) for name, budget in run if name == value.policy]
            raise UsageError(
                f"The study {study.name!r}: a value of its paper is of {value.policy} at the "
                f"budget {paper_budget(value.budget)}, which is not run: take "
                f"{' or '.join(sorted(known))}."
            )


def _canonical_paper(paper: Paper) -> Paper:
    """With tasks and measures in the one way that rows have them."""
    values = [
        replace(
            value,
            task=None if value.task is None else spell(parse_task(value.task)),
            measure=None if value.measure is None else short_spelling(parse_measure(value.measure)),
        )
        for value in paper.values
    ]
    return replace(paper, values=tuple(values))


def _cells_of_model(study: Study, model: str) -> list[Cell]:
    """All cells of a model, each once however often it is named; measures spelled in one way."""
    measures = {one: parse_measure(one) for one in study.measure}
    found: dict[tuple[object, ...], Cell] = {}
    for cell in cells_of(study, model):
        own, amount = measures[cell.measure], cell.amount
        is_alike = amount is not None and own.is_alike(amount)
        one = replace(cell, measure=short_spelling(own), ignores_matching=is_alike)
        found.setdefault((*one.place, one.seed, one.measure), one)
    return list(found.values())
