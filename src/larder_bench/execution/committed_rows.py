"""Check of committed rows: one cell of a study is measured again and compared.

Fields of time and of the machine are left out. On the processor, torch and kernels of the row all
else must be equal, elsewhere nearly so (`larder_bench.execution.row_comparison`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from larder.core import InputError, LarderError, MissingWeights
from larder_bench.datasets.conversation_file import conversation_digest
from larder_bench.execution.measured_cells import MeasuredCells
from larder_bench.execution.row_comparison import Rounding, differences
from larder_bench.execution.runner import ContextLoader, measure_cell, validate_study
from larder_bench.results.environment import KERNELS_KEY, PROCESSOR_KEY
from larder_bench.results.rows import TEXT_DIGEST_KEY, Row, split_exhibits, without_timings
from larder_bench.studies.cells import Cell
from larder_bench.studies.study import Study

# Of environments: they choose kernels.
_ROUNDING_KEYS = (PROCESSOR_KEY, KERNELS_KEY, "torch", "accelerator")
# Fields that name the machine and the revision.
ORIGIN_KEYS = frozenset({"environment", "study", "accelerator"})
SHARED_KEY = "shared_with"  # of rows that were not measured themselves


@dataclass(frozen=True)
class CheckedCell:
    """A committed row and the same cell measured again.

    Args:
        row: the committed row.
        differences: fields that differ, each with both values; empty if the row was re-created.
        rounding: how both were compared: exactly if everything is equal, whatever their kernels.
    """

    row: Row
    differences: tuple[str, ...]
    rounding: Rounding = Rounding.SAME


def cheapest_cells(
    study: Study, rows: Sequence[Row], policies: Sequence[str] = ()
) -> list[tuple[Cell, Row]]:
    """Cell of each policy that took the fewest seconds, and its row, in order of these seconds.

    Cells are those of the study's first conversation; rows that were refused or shared are left
    out.

    Args:
        policies: names to choose from; empty for those of the study, or for its controls if it has
            none.

    Raises:
        InputError: no row is of the study, or of these policies.
    """
    cells = {_place(cell.head({})): cell for cell in validate_study(study)}
    wanted = policies or study.policies or study.controls
    found = [
        row
        for row in rows
        if row["seed"] == study.first_seed and row["policy"] in wanted
        if "refused" not in row and SHARED_KEY not in row and _place(row) in cells
    ]
    if not found:
        raise InputError(
            f"No committed row of the study {study.name} can be measured again"
            f"{' for ' + ', '.join(policies) if policies else ''}: take --policy from "
            f"{', '.join(study.policies or study.controls)}, or measure rows by "
            f"larder bench --study {study.name}."
        )
    cheapest = dict[str, Row]()
    for row in sorted(found, key=lambda one: one["seconds"]):
        cheapest.setdefault(row["policy"], row)
    return [(cells[_place(row)], row) for row in cheapest.values()]


def rounding_of(committed: Row, here: Row) -> Rounding:
    """Rounding that a committed row's environment and this one have in common; another one if the
    processor or the kernels of the row are not known.
    """
    known = PROCESSOR_KEY in committed and KERNELS_KEY in committed
    equal = all(committed.get(key) == here.get(key) for key in _ROUNDING_KEYS)
    return Rounding.SAME if known and equal else Rounding.OTHER


def check_cell(
    cell: Cell, row: Row, open_model: ContextLoader, rounding: Rounding = Rounding.SAME
) -> CheckedCell:
    """Measure a cell and compare it with its row.

    Another text than that of the row, and a cell that is refused now, are differences.

    Raises:
        MissingWeights: the policy needs weights that were not trained here.
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
    except MissingWeights:
        raise
    except LarderError as error:
        return CheckedCell(row, (f"refused now: {error}",))
    again = _compared(split_exhibits(cell.head(bench.row_fields()) | measured)[-1])
    exact = tuple(differences(_compared(row), again, Rounding.SAME))
    if not exact or rounding is Rounding.SAME:
        return CheckedCell(row, exact)
    return CheckedCell(row, tuple(differences(_compared(row), again, rounding)), rounding)


def _place(row: Row) -> tuple[Any, ...]:
    names = ("model", "task", "tokens", "seed", "spelling", "budget", "matched", "measure")
    return (*(row[name] for name in names), row.get("question", "after"))


def _compared(row: Row) -> Row:
    return {name: value for name, value in without_timings(row).items() if name not in ORIGIN_KEYS}
