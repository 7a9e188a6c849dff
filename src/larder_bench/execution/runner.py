"""Runner of a study: measures every cell that the results file does not hold yet, model by model.

The result of a cell depends on nothing that this process did before, so that a resumed study has
the same rows as an uninterrupted one. The first guess of a budget in bytes comes from the first
seed, which is always in the file by then. A cell with the same result at equal bytes and equal
tokens, such as the full cache, is measured once and gets a row for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from larder.core import Family, InputError, SpellingError, UsageError, build, parse, spell
from larder_bench.datasets.conversation_file import conversation_digest
from larder_bench.datasets.task_prompts import QuestionPlacement
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
    SHARED_KEY,
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
# Executor for the cells of a model, given its name, the rows already measured, and a callback for
# environment rows of other machines.
ExecutionStrategy = Callable[[str, Sequence[Row], Callable[[Row], None]], JobExecutor[Cell]]


def run_locally(
    model: str, rows: Sequence[Row], on_environment: Callable[[Row], None]
) -> JobExecutor[Cell]:
    """Execution strategy that measures one cell after the other in this process."""
    return run_in_order


def parse_measure(sentence: str) -> Measure:
    """Measure of a spelling.

    Raises:
        LarderError: the measure or a parameter does not exist.
    """
    calls = parse(sentence, "measure")
    if len(calls) != 1:
        raise SpellingError(f"{sentence!r} is not one measure: write name(parameter=value).")
    return build(MEASURES.load(calls[0].name), calls[0].parameters)


def validate_study(study: Study) -> list[Cell]:
    """All cells of a study, resolved before any work starts so that unknown names fail at once.

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
    """Run of a study that writes its rows to a results file.

    Args:
        out: results file.
        open: loads a model by name.
        threads: torch threads.
        execution: strategy that executes the cells of a model.
    """

    study: Study
    out: Path
    open: ContextLoader
    threads: int
    execution: ExecutionStrategy = run_locally
    _model_fields: dict[str, Row] = field(default_factory=dict[str, Row], init=False, compare=False)

    def run(self, on_row: ProgressCallback = ignore_progress) -> None:
        """Measure the missing cells.

        Raises:
            LarderError: a model cannot be loaded, or something in the study does not exist.
        """
        for bench, environment, run in self._runs():
            remaining = run.remaining()
            _build_conversations(bench, remaining)
            rows = self._selected_rows(run.jobs[0].model, self._stored_cells())
            _check_texts(bench, remaining, rows, self.out)
            if remaining:
                self._append_environment(environment)
            self._append_paper()
            run.run(on_row)

    def estimate(self, known: Sequence[Row] = ()) -> dict[CostGroup, float]:
        """Estimated seconds by model, task, length, measure and policy.

        Args:
            known: measured rows. Groups without one are estimated from one cell, measured now.

        Raises:
            LarderError: see `run`.
        """
        seconds: dict[CostGroup, float] = {}
        of_rows = _mean_seconds(known)
        for model in self.study.models:
            cells = distinct_cells(self._cells[model])
            counts = Counter(map(_cost_group, cells))
            seconds |= {
                group: of_rows[group] * n for group, n in counts.items() if group in of_rows
            }
            if not (missing := [cell for cell in cells if _cost_group(cell) not in of_rows]):
                continue
            bench = self.open(model)
            _build_conversations(bench, missing)
            seconds |= estimate_seconds(
                missing, _cost_group, lambda cell, bench=bench: _measure_uncached(bench, cell, None)
            )
        return seconds

    def rows(self) -> list[Row]:
        """Requested cells that the file holds, of the models opened so far."""
        stored = self._stored_cells()
        return [row for model in self._model_fields for row in self._selected_rows(model, stored)]

    def num_other_cells(self) -> int:
        """Number of cells in the file that belong to other runs and studies."""
        return len(self._stored_cells()) - len(self.rows())

    @cached_property
    def _cells(self) -> dict[str, list[Cell]]:
        return {model: _cells_of_model(self.study, model) for model in self.study.models}

    def _selected_rows(self, model: str, rows: Sequence[Row]) -> list[Row]:
        """Rows of the requested cells of a model."""
        keys = {cell_key(cell.head(self._model_fields[model])) for cell in self._cells[model]}
        return [row for row in rows if cell_key(row) in keys]

    def paper(self) -> Paper | None:
        """Paper of the study, its tasks and measures in their canonical spelling."""
        return None if self.study.paper is None else _canonical_paper(self.study.paper)

    def _append_paper(self) -> None:
        """Append the paper's row to the file unless it is already there."""
        if (paper := self.paper()) is not None:
            row = paper.row(self.study.name)
            stored = read_results([self.out]).papers if self.out.exists() else ()
            if row not in stored:
                append_rows(self.out, [row])

    def _stored_cells(self) -> list[Row]:
        return list(read_results([self.out]).cells) if existing_rows(self.out) else []

    def _runs(self) -> Iterator[tuple[ModelContext, Row, ResumableRun[Cell]]]:
        for model in self.study.models:
            bench = self.open(model)
            self._model_fields[model] = model_fields = bench.row_fields()
            environment = environment_row(self.threads, bench.accelerator())
            rows = self._selected_rows(model, self._stored_cells())
            known = MeasuredCells(rows)

            def measure(
                cell: Cell, bench: ModelContext = bench, known: MeasuredCells = known
            ) -> Row:
                return measure_cell(bench, known, cell)

            def head(
                cell: Cell, fields: Row = model_fields | {"environment": environment["id"]}
            ) -> Row:
                return cell.head(fields)

            run = ResumableRun(
                jobs=self._cells[model],
                head=head,
                key=cell_key,
                measure=measure,
                out=self.out,
                common={},
                executor=self.execution(model, rows, self._append_environment),
            )
            yield bench, environment, run

    def _append_environment(self, environment: Row) -> None:
        """Append an environment row to the file unless it is already there."""
        if not any(row.get("id") == environment["id"] for row in existing_rows(self.out)):
            append_rows(self.out, [environment])


def _mean_seconds(rows: Sequence[Row]) -> dict[CostGroup, float]:
    """Mean duration of a row by cost group, without rows that were not measured themselves."""
    seconds: dict[CostGroup, list[float]] = {}
    for row in rows:
        if SHARED_KEY not in row:
            names = (row["model"], row["task"], str(row["tokens"]), row["measure"], row["policy"])
            seconds.setdefault(names, []).append(row["seconds"])
    return {group: fmean(each) for group, each in seconds.items()}


def _cost_group(cell: Cell) -> CostGroup:
    """Key of cells with about the same duration."""
    task, length, *_ = cell.setting
    return cell.model, task, length, cell.measure, cell.subject.name


def _build_conversations(bench: ModelContext, cells: Sequence[Cell]) -> None:
    """Build one conversation of each kind, so that a missing source is not reported as a policy's
    refusal.

    Raises:
        LarderError: a task cannot be built.
    """
    for cell in {cell.setting[:2]: cell for cell in reversed(cells)}.values():
        bench.conversation(cell.task, cell.seed, cell.tokens)


def _check_texts(
    bench: ModelContext, remaining: Sequence[Cell], rows: Sequence[Row], out: Path
) -> None:
    """Rebuild one stored conversation of each kind and compare digests: a file holds rows of one
    text only.

    Raises:
        InputError: stored rows were measured on other texts than the remaining cells would be.
    """
    cells = {(spell(cell.task), cell.tokens): cell for cell in remaining}
    stored = {(row["task"], row["tokens"]): row for row in rows if TEXT_DIGEST_KEY in row}
    for kind in cells.keys() & stored.keys():
        cell, row = cells[kind], stored[kind]
        if (
            conversation_digest(bench.conversation(cell.task, row["seed"], cell.tokens))
            != row[TEXT_DIGEST_KEY]
        ):
            raise InputError(
                f"{out} holds rows of {row['task']} that were measured on other texts: give the "
                "same --corpus and --data as then, or another --out."
            )


def measure_cell(bench: ModelContext, known: MeasuredCells, cell: Cell) -> Row:
    """Result row of a cell."""
    row = known.shared_row(cell) or _measure_uncached(bench, cell, known.tokens_per_byte(cell))
    known.learn(cell, row)
    return row


def _measure_uncached(bench: ModelContext, cell: Cell, tokens_per_byte: float | None) -> Row:
    measured = parse_measure(cell.measure).measure(bench, cell, tokens_per_byte)
    return measured | {
        TEXT_DIGEST_KEY: conversation_digest(bench.conversation(cell.task, cell.seed, cell.tokens))
    }


def _check_paper(study: Study, cells: Sequence[Cell]) -> None:
    """Check that every value of the paper belongs to a policy and a budget of the study.

    Raises:
        UsageError: a value is of a policy at a budget that it is not run at.
    """
    run = {(cell.subject.name, cell.budget) for cell in cells}
    for value in study.paper.values if study.paper is not None else ():
        if (value.policy, value.budget) not in run:
            known = [paper_budget(budget) for name, budget in run if name == value.policy]
            raise UsageError(
                f"The study {study.name!r}: its paper has a value of {value.policy} at the "
                f"budget {paper_budget(value.budget)}, which is not run: take "
                f"{' or '.join(sorted(known))}."
            )


def _canonical_paper(paper: Paper) -> Paper:
    """Paper with tasks and measures in their canonical spelling."""
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
    """Distinct cells of a model, measures in their canonical spelling."""
    measures = {one: parse_measure(one) for one in study.measure}
    for name, measure in measures.items():
        if QuestionPlacement.INSIDE.value in study.question and not measure.supports_inside:
            raise UsageError(
                f"The measure {name} asks no question inside the compressed context: leave out "
                "--question inside, or take the measure forced, generated or answer_kl."
            )
    distinct: dict[tuple[object, ...], Cell] = {}
    for cell in cells_of(study, model):
        measure, amount = measures[cell.measure], cell.amount
        is_alike = amount is not None and measure.is_alike(amount)
        one = replace(cell, measure=short_spelling(measure), ignores_matching=is_alike)
        distinct.setdefault((*one.setting, one.seed, one.measure), one)
    return list(distinct.values())
