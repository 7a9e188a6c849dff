"""Cells of a study: every task, length and seed under every policy and budget, in their order.

All policies read one conversation before the next one starts, so that an interrupted study has
complete conversations to compare on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from larder.core import MemoryBudget, UsageError, public_name, spell
from larder_bench.datasets.task_prompts import QuestionPlacement
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
from larder_bench.tasks.base import BenchTask, parse_task


@dataclass(frozen=True)
class Cell:
    """One conversation under one policy at one budget.

    Args:
        model: name of the model, as in the study.
        measure: spelling of the measure.
        question: place of the question.
        budget: amount, `1/1` if nothing is dropped, or `own` if the policy's spelling contains it.
        has_exhibits: whether its row comes with exhibits of the caches.
        ignores_matching: whether its measure interprets the budget the same way for every matched
            quantity.
    """

    study: str
    model: str
    task: BenchTask
    tokens: int
    seed: int
    subject: ComparedMethod
    budget: str
    matched: MatchedQuantity
    measure: str
    question: QuestionPlacement = QuestionPlacement.AFTER
    has_exhibits: bool = False
    ignores_matching: bool = False

    @property
    def amount(self) -> MemoryBudget | None:
        """Budget; None if there is nothing to choose."""
        return None if self.budget in (WHOLE, OWN) else MemoryBudget.parse(self.budget)

    @property
    def setting(self) -> tuple[str, ...]:
        """Key shared by cells of different seeds."""
        head = spell(self.task), str(self.tokens), self.subject.spelling
        return (*head, self.budget, self.question.value, self.matched.value)

    @property
    def is_alike(self) -> bool:
        """Test if the result is the same for every matched quantity."""
        kinds = {self.subject.matched(one) for one in MatchedQuantity}
        return self.amount is None or self.ignores_matching or len(kinds) == 1

    def head(self, model_fields: Row) -> Row:
        """First fields of the cell's row.

        Args:
            model_fields: fields of the model (`ModelContext.row_fields`).
        """
        return {
            "schema": SCHEMA,
            "row": CELL,
            "study": self.study,
            "model": self.model,
            **model_fields,
            "task": spell(self.task),
            "kind": public_name(type(self.task)),
            "tokens": self.tokens,
            "seed": self.seed,
            "policy": self.subject.name,
            "spelling": self.subject.spelling,
            "budget": self.budget,
            "matched": self.matched.value,
            "measure": self.measure,
            "question": self.question.value,
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
        Cell(study.name, model, task, tokens, seed, one, budget, matched, measure, question)
        for task, tokens in _lengths(study)
        for question in map(QuestionPlacement, study.question)
        for seed in range(study.first_seed, study.first_seed + study.files)
        for measure in study.measure
        for matched in map(MatchedQuantity, study.matched)
        for one in subjects
        for budget in one.budgets(study.budgets)
    ]
    return _with_exhibits(cells)


def distinct_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Cells to measure: the first of each set of cells with equal results."""
    first: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        matched = None if cell.is_alike else cell.matched
        first.setdefault((cell.model, *cell.setting[:-1], cell.seed, cell.measure, matched), cell)
    return list(first.values())


def short_spelling(part: object) -> str:
    """Spelling of a part; its name alone if all parameters have their defaults."""
    kind = type(part)
    is_default = all(getattr(part, f.name) == f.default for f in fields(kind))  # pyright: ignore
    return public_name(kind) if is_default else spell(part)


def _with_exhibits(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with exhibits assigned to the first cell of each task, length and policy.

    Methods that retrieve text or prefill again for each question have no exhibits.
    """
    first: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        if (
            isinstance(cell.subject, PolicyMethod)
            and cell.subject.prefill_scope is not QuestionScope.EACH
            and cell.question is QuestionPlacement.AFTER
        ):
            first.setdefault(cell.setting[:3], cell)
    selected = {id(cell) for cell in first.values()}
    return [replace(cell, has_exhibits=id(cell) in selected) for cell in cells]


def _lengths(study: Study) -> Iterator[tuple[BenchTask, int]]:
    for study_task in study.tasks:
        task = parse_task(study_task.spelling)
        yield from ((task, tokens) for tokens in study_task.tokens)


def _methods(study: Study) -> list[ComparedMethod]:
    """Policies, then controls, without duplicate spellings.

    Raises:
        UsageError: two different methods have one name, so that tables would mix them up.
    """
    methods: dict[str, ComparedMethod] = {}
    for one in (*map(parse_method, study.policies), *map(parse_control, study.controls)):
        methods.setdefault(one.spelling, one)
    names = [one.name for one in methods.values()]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{name} is a policy and a control of the study, and they differ: write the policy "
                f"out, as 'larder policy show {name}' does."
            )
    return list(methods.values())
