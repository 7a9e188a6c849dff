"""Values reported by a paper, and the measured values to compare them with, in a study's file.

    [paper]
    cite = 'Authors, "Title" (year), arXiv:dddd.ddddd, table 1'
    setup = "Llama-3-8B, LongBench, a budget of 20%"
    differs = ["the embedded model", "needles in place of LongBench"]

    [[paper.values]]
    policy = "d2o"                # of the study
    budget = "1/5"                # of the study; "full" or "own" where it does not choose
    scale = "exact"               # ours, see SCALES and COSTS
    paper = 19.93                 # a number, or words where the paper has no number
    unit = "F1"
    says = "MF-en"                # which row or column it is

Ours is over all tasks and lengths unless `task`, `tokens` or `kind` (of items) say otherwise. Where
a study has several measures or ways to match, `measure` and `matched` say which. `against` names a
policy that ours is a multiple of, as in a speedup; `above` one that it is a difference to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from larder.core.errors import UnknownName, UsageError
from larder.core.family import unknown_name_message
from larder_bench.results.budget_labels import OWN, WHOLE
from larder_bench.results.rows import PAPER, SCHEMA, Row
from larder_bench.results.tables import SCALES, TIMES, ScoreScale
from larder_bench.results.toml_tables import convert_table

MIB = float(2**20)
REFERENCE_KEYS = ("against", "above")  # name another policy
DISAMBIGUATING_KEYS = ("measure", "matched")  # must be said where a study has several
PAPER_KEYS = ("cite", "setup", "differs", "values")  # of a row
FULL = "full"  # how the budget of what keeps everything is written here


@dataclass(frozen=True)
class CellCost:
    """A number that each cell has.

    Args:
        key: its name there.
        title: what tables call it, with its unit.
        digits: behind the point.
        unit: that it is divided by.
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
    """A figure of a paper, and where ours is found.

    Args:
        policy, budget: of ours.
        scale: that ours is on.
        paper: the number, or what the paper says where it has none.
        unit: of the paper.
        says: which row or column of the paper it is.
        task, tokens, kind: that ours is over; all unless given.
        measure, matched: of ours where the study has several.
        against: a policy; ours is a multiple of that one's.
        above: a policy; ours is how far it lies above that one's, question by question.
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
        """Test if a study has everything that the value names, without ambiguity.

        Args:
            known: what a study names, by the fields here.
        """
        own = {name: asdict(self)[name] for name in known}
        unsaid = [n for n in DISAMBIGUATING_KEYS if own[n] is None and len(known[n]) > 1]
        named = (str(one) in map(str, known[n]) for n, one in own.items() if one is not None)
        return not unsaid and all(named)

    @property
    def on(self) -> ScoreScale | CellCost:
        """The scale of ours."""
        return known_scales()[self.scale]


@dataclass(frozen=True)
class Paper:
    """Paper with its reported values.

    Args:
        cite: authors, title, year, arXiv number, and which table or figure.
        setup: what was run there.
        differs: what is otherwise here.
    """

    cite: str
    setup: str
    differs: tuple[str, ...] = ()
    values: tuple[ReportedValue, ...] = ()

    def check(self, where: str, known: Mapping[str, Sequence[Any]]) -> None:
        """Test if a study has everything that the paper names.

        Args:
            where: the study, as errors call it.
            known: what a study names, by the fields of `ReportedValue`.

        Raises:
            UnknownName: a value is of something else.
            UsageError: a value does not say which of several measures or matches.
        """
        for number, value in enumerate(self.values, start=1):
            place = f"{where}: paper.values {number}"
            for name, names in {**known, "scale": list(known_scales())}.items():
                own, choices = asdict(value)[name], list(map(str, names))
                if own is not None and str(own) not in choices:
                    word = "policy" if name in (*REFERENCE_KEYS, "policy") else name
                    what = f"{word} of the study" if name in known else name
                    told = unknown_name_message(
                        what, str(own), [paper_budget(one) for one in choices]
                    )
                    raise UnknownName(f"{place}: {told}")
                if own is None and name in DISAMBIGUATING_KEYS and len(names) > 1:
                    raise UsageError(f"{place} must say {name}: {' or '.join(choices)}.")
            if value.against and value.above:
                raise UsageError(f"{place} has against and above: take one of the two.")

    def row(self, study: str) -> Row:
        """Row of a results file."""
        values = [
            {key: own for key, own in asdict(value).items() if own not in (None, "")}
            for value in self.values
        ]
        head = {"schema": SCHEMA, "row": PAPER, "study": study, "cite": self.cite}
        return head | {"setup": self.setup, "differs": list(self.differs), "values": values}

    @staticmethod
    def of(row: Row) -> Paper:
        """Paper from a row that `larder bench` wrote.

        Raises:
            UnknownName: a value has a key or a scale that nobody knows, as of a later version.
            UsageError: or it is not what its key takes.
        """
        where = f"The paper of {row['study']}"
        paper = convert_table({key: row[key] for key in PAPER_KEYS}, Paper, where)
        for value in paper.values:
            if value.scale not in known_scales():
                unknown = unknown_name_message("scale", value.scale, list(known_scales()))
                raise UnknownName(f"{where}: {unknown}")
        return paper


def known_scales() -> dict[str, ScoreScale | CellCost]:
    """Scales of measured values, by name."""
    return {one.key: one for one in (*SCALES, *COSTS)}


def nameable_budgets(budgets: Sequence[str]) -> list[str]:
    """Names that a value can refer to in a study with these budgets."""
    return [*budgets, WHOLE, OWN]


def paper_budget(budget: str) -> str:
    """Value as written in a file."""
    return FULL if budget == WHOLE else budget
