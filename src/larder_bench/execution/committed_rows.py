"""Check of committed rows: one cell of a study is measured again and compared.

Fields of time and of the machine are left out. On the processor, torch and kernels of the row all
else must be equal, elsewhere nearly so (`larder_bench.execution.row_comparison`).

A check costs less than its row did: a budget in bytes is not searched again, but taken from the row
in tokens, and where each question has a prefill of its own only the first one is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from larder.core import InputError, LarderError, MissingWeights
from larder_bench.datasets.conversation_file import conversation_digest
from larder_bench.execution.measured_cells import MeasuredCells
from larder_bench.execution.row_comparison import (
    ITEMS,
    Deviation,
    Means,
    Rounding,
    differences,
    item_means,
    largest_deviation,
)
from larder_bench.execution.runner import ContextLoader, measure_cell, parse_measure, validate_study
from larder_bench.results.budget_labels import MatchedQuantity
from larder_bench.results.environment import KERNELS_KEY, PROCESSOR_KEY
from larder_bench.results.rows import (
    SHARED_KEY,
    TEXT_DIGEST_KEY,
    Row,
    split_exhibits,
    without_timings,
)
from larder_bench.studies.cells import Cell, short_spelling
from larder_bench.studies.methods import PolicyMethod
from larder_bench.studies.model_context import ModelContext
from larder_bench.studies.question_sequences import reads_each_question
from larder_bench.studies.study import Study

# Of environments: they choose kernels.
_ROUNDING_KEYS = (PROCESSOR_KEY, KERNELS_KEY, "torch", "accelerator")
# Fields that name the machine and the revision.
ORIGIN_KEYS = frozenset({"environment", "study", "accelerator"})
READS_KEY = "reads"  # tries of a search for a budget, or prefills
CALIBRATION_SECONDS = 40.0  # of one calibration of SmolLM2 or Gemma, about
OTHERS = 4  # checks that may take the place of one without trained weights
LONG_SECONDS = 30.0  # a check that takes longer is made of a control
PEAK_KEY = "peak_kv_bytes"  # of answers, the longest of all


@dataclass(frozen=True)
class PlannedCheck:
    """Cell of a study that is to be measured again.

    Args:
        asked: number of questions that are asked, the first ones; None for all.
        is_sized: whether the budget in tokens is taken from the row, instead of a search for it.
        others: of other policies, to be measured where this one has no trained weights here.
    """

    cell: Cell
    row: Row
    asked: int | None = None
    is_sized: bool = False
    others: tuple[PlannedCheck, ...] = ()

    @property
    def seconds(self) -> float:
        """Estimated duration, from that of the row, on a machine that has no calibration yet."""
        share = 1.0 if self.asked is None else self.asked / _num_questions(self.row)
        measuring = self.row["seconds"] * share / (self.row[READS_KEY] if self.is_sized else 1)
        return measuring + CALIBRATION_SECONDS * self._num_calibrations

    @property
    def _num_calibrations(self) -> int:
        subject = self.cell.subject
        return len(subject.variant.policy.calibrations) if isinstance(subject, PolicyMethod) else 0

    @property
    def context(self) -> tuple[Any, ...]:
        """Key of the model and the conversation, which checks can share."""
        row = self.row
        names = ("model", "dtype", "wording", "task", "tokens", "seed")
        return (*(str(row.get(name, "")) for name in names), str(self.asked or ""))


@dataclass(frozen=True)
class CheckedCell:
    """A committed row and the same cell measured again.

    Args:
        row: the committed row.
        differences: fields that differ, each with both values; empty if the row was re-created.
        rounding: how both were compared: exactly if everything is equal, whatever their kernels.
        means: measured means over the items, by field.
        committed: means of the row, by field.
        largest: largest difference of means, in shares of what is allowed; None if all are equal.
    """

    row: Row
    differences: tuple[str, ...]
    rounding: Rounding = Rounding.SAME
    means: Means | None = None
    committed: Means | None = None
    largest: Deviation | None = None


def cheapest_check(study: Study, rows: Sequence[Row], policies: Sequence[str] = ()) -> PlannedCheck:
    """Check of the study's first conversation that takes the fewest seconds, with the next ones of
    other policies.

    Rows that were refused or shared are left out.

    Args:
        policies: names to choose from; empty for those of the study, or for its controls if it has
            none, or if all of its policies take long.

    Raises:
        InputError: no row is of the study, or of these policies.
    """
    cells = {_place(cell.head({})): cell for cell in validate_study(study)}
    every = [
        _planned(cells[_place(row)], row)
        for row in rows
        if row["seed"] == study.first_seed
        if "refused" not in row and SHARED_KEY not in row and _place(row) in cells
    ]
    found = [one for one in every if one.row["policy"] in (policies or study.policies)]
    if not policies and all(one.seconds > LONG_SECONDS for one in found):
        found = every
    if not found:
        raise InputError(
            f"No committed row of the study {study.name} can be measured again"
            f"{' for ' + ', '.join(policies) if policies else ''}: take --policy from "
            f"{', '.join(study.policies or study.controls)}, or measure rows by "
            f"larder bench --study {study.name}."
        )
    cheapest = dict[str, PlannedCheck]()
    for one in sorted(found, key=lambda one: one.seconds):
        cheapest.setdefault(one.row["policy"], one)
    first, *others = cheapest.values()
    return replace(first, others=tuple(others[:OTHERS]))


def rounding_of(committed: Row, here: Row) -> Rounding:
    """Rounding that a committed row's environment and this one have in common; another one if the
    processor or the kernels of the row are not known.
    """
    known = PROCESSOR_KEY in committed and KERNELS_KEY in committed
    equal = all(committed.get(key) == here.get(key) for key in _ROUNDING_KEYS)
    return Rounding.SAME if known and equal else Rounding.OTHER


def check_cell(
    planned: PlannedCheck,
    open_model: ContextLoader,
    rounding: Rounding = Rounding.SAME,
    known: Means | None = None,
) -> CheckedCell:
    """Measure a cell and compare it with its row.

    Another text than that of the row, and a cell that is refused now, are differences.

    Args:
        open_model: loads models; contexts ask all questions.
        known: means of this check under several roundings, which bound others; None if none were
            measured.

    Raises:
        MissingWeights: the policy needs weights that were not trained here.
        LarderError: the model or a source is missing.
    """
    cell, row = planned.cell, planned.row
    bench = open_model(cell.model)
    text = conversation_digest(bench.conversation(cell.task, cell.seed, cell.tokens))
    if text != row.get(TEXT_DIGEST_KEY):
        return CheckedCell(
            row, ("the text is another one: give the same --corpus and --data as for the row",)
        )
    try:
        measured = measure_cell(_asking(bench, planned.asked), MeasuredCells(()), _sized(planned))
    except MissingWeights:
        raise
    except LarderError as error:
        return CheckedCell(row, (f"refused now: {error}",))
    measured[TEXT_DIGEST_KEY] = text
    again = _compared(split_exhibits(cell.head(bench.row_fields()) | measured)[-1], planned)
    committed = _compared(row, planned)
    means, former = (item_means(each.get(ITEMS) or ()) for each in (again, committed))
    exact = tuple(differences(committed, again, Rounding.SAME))
    if not exact or rounding is Rounding.SAME:
        return CheckedCell(row, exact, means=means, committed=former)
    return CheckedCell(
        row,
        tuple(differences(committed, again, rounding, known=known)),
        rounding,
        means,
        former,
        largest_deviation(committed.get(ITEMS) or (), again.get(ITEMS) or (), known),
    )


def _planned(cell: Cell, row: Row) -> PlannedCheck:
    measure = parse_measure(cell.measure)
    each = measure.reads_each or reads_each_question(cell.subject, cell.task, cell.question)
    asked = 1 if measure.asks and each and _num_questions(row) > 1 else None
    searched = row.get("matched") != MatchedQuantity.TOKENS.value and row.get(READS_KEY, 1) > 1
    once = not each or asked is not None or _num_questions(row) == 1
    return PlannedCheck(cell, row, asked, measure.asks and searched and once)


def _num_questions(row: Row) -> int:
    return len({item.get("question") for item in row.get(ITEMS) or ()}) or 1


def _asking(bench: ModelContext, asked: int | None) -> ModelContext:
    return bench if asked == bench.asked else replace(bench, asked=asked)


def _sized(planned: PlannedCheck) -> Cell:
    """Cell that has the row's budget in tokens, and a brief measure."""
    cell = planned.cell
    cell = replace(cell, measure=short_spelling(parse_measure(cell.measure).brief()))
    if not planned.is_sized:
        return cell
    tokens = str(planned.row["budget_tokens"])
    return replace(cell, budget=tokens, matched=MatchedQuantity.TOKENS)


def _place(row: Row) -> tuple[Any, ...]:
    names = ("model", "task", "tokens", "seed", "spelling", "budget", "matched", "measure")
    return (*(row[name] for name in names), row.get("question", "after"))


def _compared(row: Row, planned: PlannedCheck) -> Row:
    """Fields of a row that its check has, too."""
    left_out = ORIGIN_KEYS | ({READS_KEY} if planned.is_sized or planned.asked else set())
    left_out |= {PEAK_KEY} if planned.asked else set()
    fields = {name: value for name, value in without_timings(row).items() if name not in left_out}
    if planned.asked is not None and ITEMS in fields:
        fields[ITEMS] = [item for item in fields[ITEMS] if item["question"] < planned.asked]
    return fields
