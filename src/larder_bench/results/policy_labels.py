"""Short labels of policies that a study spells as sentences, so that tables stay narrow.

The label of a sentence has the parts and parameters that not all sentences beside it share; if that
is long, too, the label is a number. A legend below the table or on the page spells out each label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from larder.core import Call, SpellingError, Value, parse
from larder_bench.results.rows import Row

LONG, LONGEST = 36, 56  # characters of a label, and of one that has no shorter form
PartParameter = tuple[
    str, str, Value
]  # part, parameter, value; the last two empty for a part alone


def policy_labels(names: Iterable[str]) -> dict[str, str]:
    """Label of each policy; most keep their own name.

    Args:
        names: policies as studies spell them, in the order in which they are numbered.
    """
    known = list(dict.fromkeys(names))
    spelled = {name: calls for name in known if len(calls := _parse_parts(name)) > 1}
    common = _common(list(spelled.values()))
    words = {name: ", ".join(_words(calls, common)) for name, calls in spelled.items()}
    parts = {name: ", ".join(_parts(calls, common)) for name, calls in spelled.items()}
    numbers = {name: f"policy {number}" for number, name in enumerate(spelled, start=1)}

    def short(name: str) -> str:
        for labels, longest in ((words, LONG), (parts, LONG), (words, LONGEST)):
            is_unique = [*labels.values(), *known].count(labels[name]) == 1
            if is_unique and 0 < len(labels[name]) <= longest:
                return labels[name]
        return numbers[name]

    return {name: short(name) if name in spelled else name for name in known}


def relabel_rows(rows: Iterable[Row], names: Mapping[str, str]) -> list[Row]:
    """Rows with the labels of their policies."""
    return [row | {"policy": names[row["policy"]]} for row in rows]


def label_legend(names: Mapping[str, str]) -> list[str]:
    """Markdown list of labels and their policies; empty if there are none."""
    lines = [f"- {short}: `{name}`" for name, short in names.items() if short != name]
    return ["Policies that are spelled out:", "", *lines, ""] if lines else []


def _parse_parts(name: str) -> list[Call]:
    """Parts of a sentence; empty if the name is not a sentence."""
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
    """Parts that other sentences lack, or only their differing parameters."""
    for call in calls:
        differing = [
            (key, value)
            for key, value in call.parameters.items()
            if (call.name, key, value) not in common
        ]
        parameters = ", ".join(f"{key}={value}" for key, value in differing)
        if (call.name, "", None) not in common:
            yield f"{call.name}({parameters})" if parameters else call.name
        elif parameters:
            yield parameters


def _parts(calls: Sequence[Call], common: set[PartParameter]) -> Iterator[str]:
    """Names of the parts that other sentences lack."""
    yield from (call.name for call in calls if (call.name, "", None) not in common)
