"""Values reported by a paper and the measured values to compare them with, as a study's file has
them.

    [paper]
    cite = 'Authors, "Title" (year), arXiv:dddd.ddddd, table 1'
    setup = "Llama-3-8B, LongBench, a budget of 20%"
    differs = ["the embedded model", "needles in place of LongBench"]

    [[paper.values]]
    policy = "d2o"                # of the study
    budget = "1/5"                # of the study; "full" or "own" for policies without a budget
    scale = "exact"               # of the measured value, see SCALES and COSTS
    paper = 19.93                 # a number, or a text if the paper has no number
    unit = "F1"
    says = "MF-en"                # row or column of the paper

The measured value is over all tasks and lengths unless `task`, `tokens` or `kind` (of items) select
some. `measure`, `matched` and `question` are required where a study has several. `against` names a
policy that the measured value is divided by, as in a speedup; `above` one that it is a difference
to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from larder.core import UnknownName, UsageError, unknown_name_message
from larder_bench.results.budget_labels import OWN, WHOLE
from larder_bench.results.rows import PAPER, SCHEMA, Row
from larder_bench.results.tables import SCALES, TIMES, ItemScale
from larder_bench.results.toml_tables import convert_table

MIB = float(2**20)
REFERENCE_KEYS = ("against", "above")  # name another policy
DISAMBIGUATING_KEYS = ("measure", "matched", "question")  # required where a study has several
PAPER_KEYS = ("cite", "setup", "differs", "values")  # of a row
FULL = "full"  # budget of a policy that keeps everything, in a study's file


@dataclass(frozen=True)
class CellCost:
    """Number that each cell has.

    Args:
        key: field of a cell's row.
        title: heading in tables, with its unit.
        digits: decimal places.
        unit: divisor of the field.
    """

    key: str
    title: str
    digits: int
    unit: float = 1.0


COSTS = (
    CellCost("bytes_share", "share of the full cache's bytes", digits=3),
    CellCost("kv_bytes", "MiB of all caches", digits=2, unit=MIB),
    CellCost("active_kv_bytes", "MiB of the active cache", digits=2, unit=MIB),
    CellCost("slow_kv_bytes", "MiB of the slow tier", digits=2, unit=MIB),
    CellCost("peak_kv_bytes", "MiB of caches at their peak", digits=2, unit=MIB),
    CellCost("batch", "sequences at once", digits=0),
    *(CellCost(key, f"seconds: {title}", digits=4) for key, title in TIMES.items()),
    CellCost("seconds", "seconds of a cell in all", digits=2),
)


@dataclass(frozen=True)
class ReportedValue:
    """Value reported by a paper, and the measured value that it is compared with.

    Args:
        policy, budget: of the measured value.
        scale: name of the measured value's scale.
        paper: the number, or a text if the paper has none.
        unit: of the paper.
        says: row or column of the paper.
        task, tokens, kind: selection of measured values; all by default.
        measure, matched, question: of the measured value, required if the study has several.
        against: policy whose value the measured value is divided by.
        above: policy whose value is subtracted, question by question.
    """

    policy: str
    budget: str
    scale: str
    paper: float | int | str
    unit: str = ""
    says: str = ""
    task: str | None = None
    tokens: int | None = None
    kind: str | None = None
    measure: str | None = None
    matched: str | None = None
    question: str | None = None
    against: str | None = None
    above: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.paper, float) and not isfinite(self.paper):
            raise UsageError(
                f"paper must be a finite number, or a text in quotes, got {self.paper}."
            )
        if self.budget == FULL:
            object.__setattr__(self, "budget", WHOLE)

    def is_among(self, known: Mapping[str, Sequence[Any]]) -> bool:
        """Test if a study has everything that the value refers to, without ambiguity.

        Args:
            known: values of a study, by the fields of this class.
        """
        fields = {name: asdict(self)[name] for name in known}
        ambiguous = [n for n in DISAMBIGUATING_KEYS if fields[n] is None and len(known[n]) > 1]
        matches = (str(one) in map(str, known[n]) for n, one in fields.items() if one is not None)
        return not ambiguous and all(matches)

    @property
    def measured_scale(self) -> ItemScale | CellCost:
        """Scale of the measured value."""
        return known_scales()[self.scale]


@dataclass(frozen=True)
class Paper:
    """Paper with its reported values.

    Args:
        cite: authors, title, year, arXiv number, and which table or figure.
        setup: the paper's experiment.
        differs: how the study differs from it.
    """

    cite: str
    setup: str
    differs: tuple[str, ...] = ()
    values: tuple[ReportedValue, ...] = ()

    def check(self, where: str, known: Mapping[str, Sequence[Any]]) -> None:
        """Check that a study has everything that the paper refers to.

        Args:
            where: the study, as named in errors.
            known: values of a study, by the fields of `ReportedValue`.

        Raises:
            UnknownName: a value refers to something that the study does not have.
            UsageError: a value does not select one of several measures or matched quantities.
        """
        for number, value in enumerate(self.values, start=1):
            path = f"{where}: paper.values {number}"
            for name, names in {**known, "scale": list(known_scales())}.items():
                name_used, choices = asdict(value)[name], list(map(str, names))
                if name_used is not None and str(name_used) not in choices:
                    word = "policy" if name in (*REFERENCE_KEYS, "policy") else name
                    what = f"{word} of the study" if name in known else name
                    message = unknown_name_message(
                        what, str(name_used), [paper_budget(one) for one in choices]
                    )
                    raise UnknownName(f"{path}: {message}")
                if name_used is None and name in DISAMBIGUATING_KEYS and len(names) > 1:
                    raise UsageError(f"{path} must say {name}: {' or '.join(choices)}.")
            if value.against and value.above:
                raise UsageError(f"{path} has against and above: take one of the two.")

    def row(self, study: str) -> Row:
        """Row for a results file."""
        values = [
            {key: field for key, field in asdict(value).items() if field not in (None, "")}
            for value in self.values
        ]
        head = {"schema": SCHEMA, "row": PAPER, "study": study, "cite": self.cite}
        return head | {"setup": self.setup, "differs": list(self.differs), "values": values}

    @staticmethod
    def of(row: Row) -> Paper:
        """Paper from a row that `larder bench` wrote.

        Raises:
            UnknownName: a value has an unknown key or scale, as a later version may write.
            UsageError: a value has another type than its key.
        """
        where = f"The paper of {row['study']}"
        paper = convert_table({key: row[key] for key in PAPER_KEYS}, Paper, where)
        for value in paper.values:
            if value.scale not in known_scales():
                unknown = unknown_name_message("scale", value.scale, list(known_scales()))
                raise UnknownName(f"{where}: {unknown}")
        return paper


def known_scales() -> dict[str, ItemScale | CellCost]:
    """Scales of measured values, by name."""
    return {one.key: one for one in (*SCALES, *COSTS)}


def nameable_budgets(budgets: Sequence[str]) -> list[str]:
    """Names that a value can refer to in a study with these budgets."""
    return [*budgets, WHOLE, OWN]


def paper_budget(budget: str) -> str:
    """Value as written in a file."""
    return FULL if budget == WHOLE else budget
