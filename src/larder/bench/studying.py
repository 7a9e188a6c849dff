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

from larder.bench.cells import Cell, cells_of, spelled, without_twins
from larder.bench.conversation_file import digest_of
from larder.bench.known import Known
from larder.bench.measures.base import Measure
from larder.bench.papers import Paper, budget_name
from larder.bench.rows import TEXT, Row, append, key, known_rows, results
from larder.bench.running import Each, Run, Tell, estimate, in_order, unheard
from larder.bench.study import Study
from larder.bench.surroundings import environment
from larder.bench.task import parse_task
from larder.bench.workbench import Workbench
from larder.core.errors import InputError, SpellingError, UsageError
from larder.core.family import Family
from larder.core.spelling import build, parse, spell

MEASURES = Family("measure", "larder.bench.measures")
Kind = tuple[str, str, str, str, str]  # model, task, length, measure, policy
Open = Callable[[str], Workbench]  # loads the model of that name
# How the cells of a model are gone through, given its name, the rows that are known of them, and
# whom to tell of other surroundings.
Through = Callable[[str, Sequence[Row], Callable[[Row], None]], Each[Cell]]


def here(model: str, rows: Sequence[Row], tell: Callable[[Row], None]) -> Each[Cell]:
    """One after the other, in this process."""
    del model, rows, tell
    return in_order


def measure_of(sentence: str) -> Measure:
    """A measure as it is written.

    Raises:
        LarderError: there is none, or it has no such parameter.
    """
    calls = parse(sentence, "measure")
    if len(calls) != 1:
        raise SpellingError(f"{sentence!r} is not one measure: write name(parameter=value).")
    return build(MEASURES.load(calls[0].name), calls[0].parameters)


def check(study: Study) -> list[Cell]:
    """All cells, before any work starts, so that a name that nobody knows is told at once.

    Raises:
        LarderError: something in the study does not exist.
    """
    cells = [cell for model in dict.fromkeys(study.models) for cell in _cells(study, model)]
    _check_paper(study, cells)
    return cells


@dataclass(frozen=True)
class Studying:
    """A study on its way.

    Args:
        out: the file of its results.
        open: gives the workbench of a model.
        threads: that torch computes with.
        through: how cells are gone through.
    """

    study: Study
    out: Path
    open: Open
    threads: int
    through: Through = here
    _told: dict[str, Row] = field(default_factory=dict[str, Row], init=False, compare=False)

    def go(self, tell: Tell = unheard) -> None:
        """Measure what is missing.

        Raises:
            LarderError: a model cannot be loaded, or something in the study does not exist.
        """
        for bench, surroundings, run in self._runs():
            left = run.left()
            _try_tasks(bench, left)
            _check_texts(bench, left, self._of(run.jobs[0].model, self._known()), self.out)
            if left:
                self._tell_surroundings(surroundings)
            self._tell_paper()
            run.go(tell)

    def estimate(self) -> dict[Kind, float]:
        """Seconds by model, task, length, measure and policy, from one cell of each.

        Raises:
            LarderError: as `go`.
        """
        found: dict[Kind, float] = {}
        for model in self.study.models:
            bench = self.open(model)
            cells = without_twins(self._cells[model])
            _try_tasks(bench, cells)
            found |= estimate(cells, _kind, lambda cell, bench=bench: _made(bench, cell, None))
        return found

    def rows(self) -> list[Row]:
        """The cells that were asked for and that the file holds, of the models opened so far."""
        known = self._known()
        return [row for model in self._told for row in self._of(model, known)]

    def others(self) -> int:
        """How many cells more the file holds: of other runs and other studies."""
        return len(self._known()) - len(self.rows())

    @cached_property
    def _cells(self) -> dict[str, list[Cell]]:
        return {model: _cells(self.study, model) for model in self.study.models}

    def _of(self, model: str, rows: Sequence[Row]) -> list[Row]:
        """Those of the cells that were asked for of a model."""
        asked = {key(cell.head(self._told[model])) for cell in self._cells[model]}
        return [row for row in rows if key(row) in asked]

    def paper(self) -> Paper | None:
        """What a paper reports, tasks and measures spelled as rows have them."""
        return None if self.study.paper is None else _spelled(self.study.paper)

    def _tell_paper(self) -> None:
        """Have the file hold what a paper reports, as it is written now."""
        if (paper := self.paper()) is not None:
            row = paper.row(self.study.name)
            known = results([self.out]).papers if self.out.exists() else ()
            if row not in known:
                append(self.out, [row])

    def _known(self) -> list[Row]:
        return list(results([self.out]).cells) if known_rows(self.out) else []

    def _runs(self) -> Iterator[tuple[Workbench, Row, Run[Cell]]]:
        for model in self.study.models:
            bench = self.open(model)
            self._told[model] = told = bench.told()
            surroundings = environment(self.threads, bench.accelerator())
            rows = self._of(model, self._known())
            known = Known(rows)

            def measure(cell: Cell, bench: Workbench = bench, known: Known = known) -> Row:
                return measured(bench, known, cell)

            def head(cell: Cell, told: Row = told | {"environment": surroundings["id"]}) -> Row:
                return cell.head(told)

            each = self.through(model, rows, self._tell_surroundings)
            told_of = self._cells[model], head, key, measure, self.out, {}, each
            yield bench, surroundings, Run(*told_of)

    def _tell_surroundings(self, surroundings: Row) -> None:
        """Have the file hold them."""
        if not any(row.get("id") == surroundings["id"] for row in known_rows(self.out)):
            append(self.out, [surroundings])


def _kind(cell: Cell) -> Kind:
    """What cells that take about as long have in common."""
    task, length, *_ = cell.place
    return cell.model, task, length, cell.measure, cell.subject.name


def _try_tasks(bench: Workbench, cells: Sequence[Cell]) -> None:
    """Make one conversation of each kind: that a source is missing is no policy's refusal.

    Raises:
        LarderError: a task cannot be made.
    """
    for cell in {cell.place[:2]: cell for cell in reversed(cells)}.values():
        bench.conversation(cell.task, cell.seed, cell.tokens)


def _check_texts(bench: Workbench, left: Sequence[Cell], rows: Sequence[Row], out: Path) -> None:
    """Make one conversation of each kind again, so that a file holds rows of one text alone.

    Raises:
        InputError: rows are of other texts than those that are left to measure.
    """
    cells = {(spell(cell.task), cell.tokens): cell for cell in left}
    told = {(row["task"], row["tokens"]): row for row in rows if TEXT in row}
    for kind in cells.keys() & told.keys():
        cell, row = cells[kind], told[kind]
        if digest_of(bench.conversation(cell.task, row["seed"], cell.tokens)) != row[TEXT]:
            raise InputError(
                f"{out} holds rows of {row['task']} that were measured on other texts: name the "
                "--corpus and --data of then, or another --out."
            )


def measured(bench: Workbench, known: Known, cell: Cell) -> Row:
    """What a cell comes to."""
    row = known.same(cell) or _made(bench, cell, known.guess(cell))
    known.learn(cell, row)
    return row


def _made(bench: Workbench, cell: Cell, guess: float | None) -> Row:
    measured = measure_of(cell.measure).measure(bench, cell, guess)
    return measured | {TEXT: digest_of(bench.conversation(cell.task, cell.seed, cell.tokens))}


def _check_paper(study: Study, cells: Sequence[Cell]) -> None:
    """Raises: UsageError: a value is of a policy at a budget that it is not run at."""
    run = {(cell.subject.name, cell.budget) for cell in cells}
    for value in study.paper.values if study.paper is not None else ():
        if (value.policy, value.budget) not in run:
            known = [budget_name(budget) for name, budget in run if name == value.policy]
            raise UsageError(
                f"The study {study.name!r}: a value of its paper is of {value.policy} at the "
                f"budget {budget_name(value.budget)}, which is not run: take "
                f"{' or '.join(sorted(known))}."
            )


def _spelled(paper: Paper) -> Paper:
    """With tasks and measures in the one way that rows have them."""
    values = [
        replace(
            value,
            task=None if value.task is None else spell(parse_task(value.task)),
            measure=None if value.measure is None else spelled(measure_of(value.measure)),
        )
        for value in paper.values
    ]
    return replace(paper, values=tuple(values))


def _cells(study: Study, model: str) -> list[Cell]:
    """All cells of a model, each once however often it is named; measures spelled in one way."""
    measures = {one: measure_of(one) for one in study.measure}
    found: dict[tuple[object, ...], Cell] = {}
    for cell in cells_of(study, model):
        own, amount = measures[cell.measure], cell.amount
        is_alike = amount is not None and own.is_alike(amount)
        one = replace(cell, measure=spelled(own), is_indifferent=is_alike)
        found.setdefault((*one.place, one.seed, one.measure), one)
    return list(found.values())
