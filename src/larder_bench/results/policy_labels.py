"""Short names for policies that a study spells as sentences, so that tables stay narrow.

A sentence goes by what tells it from the other sentences beside it: parts and parameters that all
of them have are left out. Where that is long, too, it has a number. Below a table, or on a page,
stands what each short name means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from larder.core.errors import SpellingError
from larder.core.spelling import Call, Value, parse
from larder_bench.results.rows import Row

LONG, LONGEST = 36, 56  # letters of a short name, and of one that has no shorter form
PartParameter = tuple[str, str, Value]  # a part, and one of its parameters or nothing


def policy_labels(names: Iterable[str]) -> dict[str, str]:
    """By each name the one that tables give it; most go by their own.

    Args:
        names: of policies as studies have them, in the order in which they are told.
    """
    known = list(dict.fromkeys(names))
    spelled = {name: calls for name in known if len(calls := _parse_parts(name)) > 1}
    common = _common(list(spelled.values()))
    words = {name: ", ".join(_words(calls, common)) for name, calls in spelled.items()}
    parts = {name: ", ".join(_parts(calls, common)) for name, calls in spelled.items()}
    numbers = {name: f"policy {number}" for number, name in enumerate(spelled, start=1)}

    def short(name: str) -> str:
        for told, longest in ((words, LONG), (parts, LONG), (words, LONGEST)):
            is_alone = [*told.values(), *known].count(told[name]) == 1
            if is_alone and 0 < len(told[name]) <= longest:
                return told[name]
        return numbers[name]

    return {name: short(name) if name in spelled else name for name in known}


def relabel_rows(rows: Iterable[Row], names: Mapping[str, str]) -> list[Row]:
    """The rows with policies by their short names."""
    return [row | {"policy": names[row["policy"]]} for row in rows]


def label_legend(names: Mapping[str, str]) -> list[str]:
    """Markdown list of short names and their policies; empty if there are none."""
    lines = [f"- {short}: `{name}`" for name, short in names.items() if short != name]
    return ["Policies that are spelled out:", "", *lines, ""] if lines else []


def _parse_parts(name: str) -> list[Call]:
    """The parts of a sentence; none of a name that is none."""
    try:
        return parse(name) if ">" in name else []
    except SpellingError:
        return []


def _common(sentences: Sequence[Sequence[Call]]) -> set[PartParameter]:
    """Parts that all sentences share, if there are several."""
    atoms = [set(_atoms(calls)) for calls in sentences]
    return set.intersection(*atoms) if len(atoms) > 1 else set()


def _atoms(calls: Sequence[Call]) -> Iterator[PartParameter]:
    for call in calls:
        yield call.name, "", None
        yield from ((call.name, *parameter) for parameter in call.parameters.items())


def _words(calls: Sequence[Call], common: set[PartParameter]) -> Iterator[str]:
    """The parts of a sentence that others lack, and else their parameters alone."""
    for call in calls:
        told = call.parameters.items()
        lacking = [(key, value) for key, value in told if (call.name, key, value) not in common]
        own = ", ".join(f"{key}={value}" for key, value in lacking)
        if (call.name, "", None) not in common:
            yield f"{call.name}({own})" if own else call.name
        elif own:
            yield own


def _parts(calls: Sequence[Call], common: set[PartParameter]) -> Iterator[str]:
    """The names alone of those parts that others lack."""
    yield from (call.name for call in calls if (call.name, "", None) not in common)
