"""Check of committed rows: one cell of a study is measured again and compared.

Fields of time and of the machine are left out. Texts, booleans and integers must be equal, other
numbers nearly so: another processor rounds bfloat16 differently, so that scores of a token may move
a little; a wrong formula moves them by more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from larder.core.errors import InputError, LarderError
from larder_bench.datasets.conversation_file import conversation_digest
from larder_bench.execution.measured_cells import MeasuredCells
from larder_bench.execution.runner import ContextLoader, measure_cell, validate_study
from larder_bench.results.rows import TEXT_DIGEST_KEY, Row, split_exhibits, without_timings
from larder_bench.studies.cells import Cell
from larder_bench.studies.study import Study

RELATIVE, ABSOLUTE = 0.02, 1e-4  # tolerance of numbers that are not integers
# Fields that name the machine and the revision.
ORIGIN_KEYS = frozenset({"environment", "study", "accelerator"})
SHARED_KEY = "shared_with"  # of rows that were not measured themselves


@dataclass(frozen=True)
class CheckedCell:
    """A committed row and the same cell measured again.

    Args:
        row: the committed row.
        differences: fields that differ, each with both values; empty if the row was re-created.
    """

    row: Row
    differences: tuple[str, ...]


def cheapest_cell(
    study: Study, rows: Sequence[Row], policies: Sequence[str] = ()
) -> tuple[Cell, Row]:
    """Cell of the study's first conversation that took the fewest seconds, and its row.

    Controls and rows that were refused or shared are left out.

    Args:
        policies: names to choose from; empty for those of the study.

    Raises:
        InputError: no row is of the study, or of these policies.
    """
    cells = {_place(cell.head({})): cell for cell in validate_study(study)}
    found = [
        row
        for row in rows
        if row["seed"] == study.first_seed and row["policy"] in (policies or study.policies)
        if "refused" not in row and SHARED_KEY not in row and _place(row) in cells
    ]
    if not found:
        raise InputError(
            f"No committed row of the study {study.name} can be measured again"
            f"{' for ' + ', '.join(policies) if policies else ''}: take --policy from "
            f"{', '.join(study.policies)}, or measure rows by larder bench --study {study.name}."
        )
    row = min(found, key=lambda one: one["seconds"])
    return cells[_place(row)], row


def check_cell(cell: Cell, row: Row, open_model: ContextLoader) -> CheckedCell:
    """Measure a cell and compare it with its row.

    Another text than that of the row, and a cell that is refused now, are differences.

    Raises:
        LarderError: the model or a source is missing.
    """
    bench = open_model(cell.model)
    text = conversation_digest(bench.conversation(cell.task, cell.seed, cell.tokens))
    if text != row.get(TEXT_DIGEST_KEY):
        return CheckedCell(
            row, ("the text is another one: give the same --corpus and --data as for the row",)
        )
    try:
        measured = measure_cell(bench, MeasuredCells(()), cell)
    except LarderError as error:
        return CheckedCell(row, (f"refused now: {error}",))
    again = split_exhibits(cell.head(bench.row_fields()) | measured)[-1]
    return CheckedCell(row, tuple(differences(_compared(row), _compared(again))))


def differences(committed: Any, measured: Any, name: str = "") -> Iterator[str]:
    """Fields in which two values differ, nested ones by their path.

    Numbers that are not integers are equal within 2 % or .0001.
    """
    if isinstance(committed, dict) and isinstance(measured, dict):
        for key in sorted({*committed, *measured}):
            path = f"{name}.{key}" if name else key
            yield from differences(committed.get(key), measured.get(key), path)
    elif isinstance(committed, list) and isinstance(measured, list | tuple):
        if len(committed) != len(measured):
            yield f"{name}: {len(committed)} values committed, {len(measured)} measured"
            return
        for place, (one, other) in enumerate(zip(committed, measured, strict=True)):
            yield from differences(one, other, f"{name}[{place}]")
    elif not _is_equal(committed, measured):
        yield f"{name}: {committed!r} committed, {measured!r} measured"


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return one == other


def _place(row: Row) -> tuple[Any, ...]:
    names = ("model", "task", "tokens", "seed", "spelling", "budget", "matched", "measure")
    return (*(row[name] for name in names), row.get("question", "after"))


def _compared(row: Row) -> Row:
    return {name: value for name, value in without_timings(row).items() if name not in ORIGIN_KEYS}
