"""Run a study: every cell that its file does not hold yet, a model after the other.

What a cell comes to depends on nothing that happened before it in this process, so that a study
that was stopped and taken up again has the rows of one that was not. The first guess at a budget in
bytes is what the first seed came to, which is always in the file by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from larder.bench.cells import Cell, cells_of, spelled
from larder.bench.measures.base import Measure
from larder.bench.papers import Paper, budget_name
from larder.bench.rows import Row, append, environment, key, known_rows, results
from larder.bench.running import Run, Tell, estimate, unheard
from larder.bench.study import Study
from larder.bench.task import parse_task
from larder.bench.workbench import Workbench
from larder.core.errors import SpellingError, UsageError
from larder.core.family import Family
from larder.core.spelling import build, parse, spell

MEASURES = Family("measure", "larder.bench.measures")
Kind = tuple[str, str, str, str, str]  # model, task, length, measure, policy
Open = Callable[[str], Workbench]  # loads the model of that name


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
    cells = [cell for model in study.models for cell in _cells(study, model)]
    _check_paper(study, cells)
    return cells


@dataclass(frozen=True)
class Studying:
    """A study on its way.

    Args:
        out: the file of its results.
        open: gives the workbench of a model.
        threads: that torch computes with.
    """

    study: Study
    out: Path
    open: Open
    threads: int

    def go(self, tell: Tell = unheard) -> None:
        """Measure what is missing.

        Raises:
            LarderError: a model cannot be loaded, or something in the study does not exist.
        """
        surroundings = environment(self.threads)
        for bench, run in self._runs(surroundings["id"]):
            left = run.left()
            _try_tasks(bench, left)
            if left and not self._knows(surroundings):
                append(self.out, [surroundings])
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
            measure = partial(_measured, bench, _Guesses(()))
            cells = _cells(self.study, model)
            _try_tasks(bench, cells)
            found |= estimate(cells, _kind, measure)
        return found

    def rows(self) -> list[Row]:
        """The cells of this study that the file holds."""
        return [row for row in self._known() if row["study"] == self.study.name]

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

    def _runs(self, surroundings: str) -> Iterator[tuple[Workbench, Run[Cell]]]:
        for model in self.study.models:
            bench = self.open(model)
            fingerprint = bench.engine.loaded.decoder.spec.fingerprint
            guesses = _Guesses([r for r in self.rows() if r["model_fingerprint"] == fingerprint])

            def measure(cell: Cell, bench: Workbench = bench, known: _Guesses = guesses) -> Row:
                return _measured(bench, known, cell)

            def head(cell: Cell, fingerprint: str = fingerprint) -> Row:
                return cell.head(fingerprint) | {"environment": surroundings}

            yield bench, Run(_cells(self.study, model), head, key, measure, self.out, {})

    def _knows(self, surroundings: Row) -> bool:
        return any(row.get("id") == surroundings["id"] for row in known_rows(self.out))


def _kind(cell: Cell) -> Kind:
    """What cells that take about as long have in common."""
    task, length, *_ = cell.place
    return cell.model, task, length, cell.measure, cell.subject.name


class _Guesses:
    """Tokens per byte that the first seed came to, by what cells of all seeds share."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._known: dict[tuple[str, ...], tuple[int, float]] = {}
        for row in rows:
            names = "task", "tokens", "spelling", "budget", "matched"
            self.learn(tuple(str(row[name]) for name in names), row["seed"], row)

    def learn(self, place: tuple[str, ...], seed: int, row: Row) -> None:
        if "budget_tokens" in row and seed <= self._known.get(place, (seed, 0.0))[0]:
            nbytes = row["kv_bytes"] if place[-1] == "total" else row["active_kv_bytes"]
            self._known[place] = seed, row["budget_tokens"] / max(1, nbytes)

    def of(self, cell: Cell) -> float | None:
        """What an earlier seed came to; nothing for the first, or where that was refused."""
        seed, guess = self._known.get(cell.place, (cell.seed, None))
        return guess if seed < cell.seed else None


def _try_tasks(bench: Workbench, cells: Sequence[Cell]) -> None:
    """Make one conversation of each kind: that a source is missing is no policy's refusal.

    Raises:
        LarderError: a task cannot be made.
    """
    for cell in {cell.place[:2]: cell for cell in reversed(cells)}.values():
        bench.conversation(cell.task, cell.seed, cell.tokens)


def _measured(bench: Workbench, guesses: _Guesses, cell: Cell) -> Row:
    row = measure_of(cell.measure).measure(bench, cell, guesses.of(cell))
    guesses.learn(cell.place, cell.seed, row)
    return row


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
    """All cells of a model, measures spelled in the one way."""
    spellings = {one: spelled(measure_of(one)) for one in study.measure}
    return [replace(cell, measure=spellings[cell.measure]) for cell in cells_of(study, model)]
