"""The cells of a study: every task, length and seed under every policy and budget, in their order.

All policies read one conversation before the next, so that a study that was stopped has whole
conversations to compare on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from larder.core.errors import UsageError
from larder.core.memory_budget import MemoryBudget
from larder.core.spelling import name_of, spell
from larder_bench.results.budget_labels import OWN, WHOLE, MatchedQuantity
from larder_bench.results.rows import CELL, SCHEMA, Row
from larder_bench.studies.methods import (
    ComparedMethod,
    PolicyMethod,
    QuestionScope,
    parse_control,
    parse_method,
)
from larder_bench.studies.study import Study
from larder_bench.tasks.base import Task, parse_task


@dataclass(frozen=True)
class Cell:
    """One conversation under one policy at one budget.

    Args:
        model: as it is asked for.
        measure: as it is spelled.
        budget: an amount, or `1/1` where nothing is dropped, or `own` where a spelling says it.
        is_shown: whether its row comes with exhibits of how the conversation was kept.
        ignores_matching: whether its measure takes the budget alike, whatever is held equal.
    """

    study: str
    model: str
    task: Task
    tokens: int
    seed: int
    subject: ComparedMethod
    budget: str
    matched: MatchedQuantity
    measure: str
    is_shown: bool = False
    ignores_matching: bool = False

    @property
    def amount(self) -> MemoryBudget | None:
        """The budget; None where there is nothing to choose."""
        return None if self.budget in (WHOLE, OWN) else MemoryBudget.parse(self.budget)

    @property
    def place(self) -> tuple[str, ...]:
        """Key that cells of different seeds share."""
        head = spell(self.task), str(self.tokens), self.subject.spelling
        return (*head, self.budget, self.matched.value)

    @property
    def is_alike(self) -> bool:
        """Test if the result is the same for every matched quantity."""
        kinds = {self.subject.matched(one) for one in MatchedQuantity}
        return self.amount is None or self.ignores_matching or len(kinds) == 1

    def head(self, told: Row) -> Row:
        """First fields of its row.

        Args:
            told: of the model (`ModelContext.told`).
        """
        return {
            "schema": SCHEMA,
            "row": CELL,
            "study": self.study,
            "model": self.model,
            **told,
            "task": spell(self.task),
            "kind": name_of(type(self.task)),
            "tokens": self.tokens,
            "seed": self.seed,
            "policy": self.subject.name,
            "spelling": self.subject.spelling,
            "budget": self.budget,
            "matched": self.matched.value,
            "measure": self.measure,
        }


def cells_of(study: Study, model: str) -> list[Cell]:
    """All cells of one model.

    Raises:
        LarderError: a task, a policy, a budget or a measure does not exist.
    """
    subjects = _methods(study)
    for budget in study.budgets:
        MemoryBudget.parse(budget)
    cells = [
        Cell(study.name, model, task, tokens, seed, one, budget, matched, measure)
        for task, tokens in _lengths(study)
        for seed in range(study.first_seed, study.first_seed + study.files)
        for measure in study.measure
        for matched in map(MatchedQuantity, study.matched)
        for one in subjects
        for budget in one.budgets(study.budgets)
    ]
    return _with_exhibits(cells)


def distinct_cells(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that have to be measured: of those that come to the same, the first."""
    first: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        matched = None if cell.is_alike else cell.matched
        first.setdefault((cell.model, *cell.place[:-1], cell.seed, cell.measure, matched), cell)
    return list(first.values())


def short_spelling(part: object) -> str:
    """A part by its name alone, where all its parameters are the usual ones."""
    kind = type(part)
    usual = all(getattr(part, f.name) == f.default for f in fields(kind))  # pyright: ignore
    return name_of(kind) if usual else spell(part)


def _with_exhibits(cells: Sequence[Cell]) -> list[Cell]:
    """Exhibits come with the first cell of each task, length and policy.

    They come with none that reads text in the place of a cache, or anew for each question.
    """
    first: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        if (
            isinstance(cell.subject, PolicyMethod)
            and cell.subject.rereads is not QuestionScope.EACH
        ):
            first.setdefault(cell.place[:3], cell)
    shown = {id(cell) for cell in first.values()}
    return [replace(cell, is_shown=id(cell) in shown) for cell in cells]


def _lengths(study: Study) -> Iterator[tuple[Task, int]]:
    for wanted in study.tasks:
        task = parse_task(wanted.spelling)
        yield from ((task, tokens) for tokens in wanted.tokens)


def _methods(study: Study) -> list[ComparedMethod]:
    """Policies, then controls; what is spelled alike only once.

    Raises:
        UsageError: two that differ have one name, so that tables could not tell them apart.
    """
    found: dict[str, ComparedMethod] = {}
    for one in (*map(parse_method, study.policies), *map(parse_control, study.controls)):
        found.setdefault(one.spelling, one)
    names = [one.name for one in found.values()]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{name} is a policy and a control of the study, and they differ: write the policy "
                f"out, as 'larder policy show {name}' does."
            )
    return list(found.values())
