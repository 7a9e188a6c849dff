"""What a paper reports, and which of our figures stands beside it; a part of a study's file.

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
from typing import Any

from larder.bench.amounts import OWN, WHOLE
from larder.bench.rows import PAPER, SCHEMA, Row
from larder.bench.tables import SCALES, TIMES, Scale
from larder.bench.told import Read, many, number_or_text, table, text, whole
from larder.core.errors import UnknownName, UsageError
from larder.core.family import unknown

MIB = float(2**20)
THAN = ("against", "above")  # name another policy
CHOSEN = ("measure", "matched")  # must be said where a study has several
FULL = "full"  # how the budget of what keeps everything is written here


@dataclass(frozen=True)
class Cost:
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
    Cost("bytes_share", "share of the full cache's bytes", digits=3),
    Cost("kv_bytes", "MiB of all caches", digits=2, unit=MIB),
    Cost("active_kv_bytes", "MiB of the active cache", digits=2, unit=MIB),
    Cost("slow_kv_bytes", "MiB of the slow tier", digits=2, unit=MIB),
    Cost("peak_kv_bytes", "MiB of caches at their peak", digits=2, unit=MIB),
    Cost("batch", "sequences at once", digits=0),
    *(Cost(key, f"seconds: {title}", digits=4) for key, title in TIMES.items()),
    Cost("seconds", "seconds of a cell in all", digits=2),
)


@dataclass(frozen=True)
class Reported:
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

    def is_among(self, known: Mapping[str, Sequence[Any]]) -> bool:
        """Whether a study has all that it names, and it says which of several.

        Args:
            known: what a study names, by the fields here.
        """
        own = {name: asdict(self)[name] for name in known}
        unsaid = [n for n in CHOSEN if own[n] is None and len(known[n]) > 1]
        named = (str(one) in map(str, known[n]) for n, one in own.items() if one is not None)
        return not unsaid and all(named)

    @property
    def on(self) -> Scale | Cost:
        """The scale of ours."""
        return known_scales()[self.scale]


@dataclass(frozen=True)
class Paper:
    """What a paper reports.

    Args:
        cite: authors, title, year, arXiv number, and which table or figure.
        setup: what was run there.
        differs: what is otherwise here.
    """

    cite: str
    setup: str
    differs: tuple[str, ...] = ()
    values: tuple[Reported, ...] = ()

    def check(self, where: str, known: Mapping[str, Sequence[Any]]) -> None:
        """Whether a study has all that is named.

        Args:
            where: the study, as errors call it.
            known: what a study names, by the fields of `Reported`.

        Raises:
            UnknownName: a value is of something else.
            UsageError: a value does not say which of several measures or matches.
        """
        for number, value in enumerate(self.values, start=1):
            place = f"{where}: paper.values {number}"
            for name, names in {**known, "scale": list(known_scales())}.items():
                own, choices = asdict(value)[name], list(map(str, names))
                if own is not None and str(own) not in choices:
                    word = "policy" if name in (*THAN, "policy") else name
                    what = f"{word} of the study" if name in known else name
                    told = unknown(what, str(own), [budget_name(one) for one in choices])
                    raise UnknownName(f"{place}: {told}")
                if own is None and name in CHOSEN and len(names) > 1:
                    raise UsageError(f"{place} must say {name}: {' or '.join(choices)}.")
            if value.against and value.above:
                raise UsageError(f"{place} has against and above: take one of the two.")

    def row(self, study: str) -> Row:
        """As it stands in a results file."""
        values = [
            {key: own for key, own in asdict(value).items() if own not in (None, "")}
            for value in self.values
        ]
        head = {"schema": SCHEMA, "row": PAPER, "study": study, "cite": self.cite}
        return head | {"setup": self.setup, "differs": list(self.differs), "values": values}

    @staticmethod
    def of(row: Row) -> Paper:
        """Of a row that `larder bench` has written.

        Raises:
            UnknownName: a value has a key or a scale that nobody knows, as of a later version.
            UsageError: or it is not what its key takes.
        """
        values = tuple(_reported(value, f"The paper of {row['study']}") for value in row["values"])
        for value in values:
            if value.scale not in known_scales():
                told = unknown("scale", value.scale, list(known_scales()))
                raise UnknownName(f"The paper of {row['study']}: {told}")
        return Paper(row["cite"], row["setup"], tuple(row["differs"]), values)


def known_scales() -> dict[str, Scale | Cost]:
    """All that ours can be on, by name."""
    return {one.key: one for one in (*SCALES, *COSTS)}


def read_paper(value: Any, where: str) -> Paper:
    """The table `[paper]` of a study's file.

    Raises:
        UnknownName: it has a key that nobody knows.
        UsageError: it lacks one, or a value is not what its key takes.
    """
    return Paper(**table(value, where, "a paper", _KEYS, ("cite", "setup")))


def _reported(value: Any, where: str) -> Reported:
    needed = ("policy", "budget", "scale", "paper")
    told = table(value, where, "a paper's value", _VALUE_KEYS, needed)
    return Reported(**told)


def _budget(value: Any, where: str) -> str:
    return WHOLE if (budget := text(value, where)) == FULL else budget


def budgets_of(budgets: Sequence[str]) -> list[str]:
    """All that a value can name in a study of these budgets."""
    return [*budgets, WHOLE, OWN]


def budget_name(budget: str) -> str:
    """As a file says it."""
    return FULL if budget == WHOLE else budget


_VALUE_KEYS: Mapping[str, Read] = {
    "policy": text,
    "budget": _budget,
    "scale": text,
    "paper": number_or_text,
    "unit": text,
    "says": text,
    "task": text,
    "tokens": whole,
    "kind": text,
    "measure": text,
    "matched": text,
    "against": text,
    "above": text,
}
_KEYS: Mapping[str, Read] = {
    "cite": text,
    "setup": text,
    "differs": many(text),
    "values": many(_reported),
}
