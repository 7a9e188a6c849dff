"""Groups of comparable cells, and their mean scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from larder.core import InputError
from larder.evaluation import Bootstrap, Interval
from larder_bench.results.budget_labels import OWN, WHOLE
from larder_bench.results.rows import Row, exhibit_key
from larder_bench.results.tables import resampling_units

ScoresBySeed = Mapping[int, Sequence[float]]  # scores of a file's items, by seed
SCORES = {
    "exact": "exact match",
    "f1": "F1",
    "f1_stemmed": "F1 (stemmed)",
    "log_likelihood": "log-likelihood (nats per token)",
    "own": "score of the data set",
    "kl": "KL divergence from the full cache (nats)",
    "same": "top-1 agreement with the full cache",
    "mass": "attention kept",
}
# Scores that are drawn by default if items have them.
MAIN = ("exact", "own", "kl", "same", "mass")
BOUNDED = frozenset({"exact", "f1", "f1_stemmed", "own", "same", "mass"})  # in [0, 1]
_FAMILY = ("study", "model", "matched", "measure", "device", "dtype", "question", "wording")
EQUAL = {"bytes": "bytes of the cache that answers", "total": "bytes of all caches together"}
_NAMED = {"matched": "equal {}", "question": "question {}", "wording": "{} wording"}


class ComparisonGroup(NamedTuple):
    """Key of cells that differ only in policy, budget and seed."""

    study: str
    model: str
    task: str
    tokens: int
    matched: str
    measure: str
    device: str = ""
    dtype: str = ""
    question: str = ""
    wording: str = ""


_BLANK: dict[str, Any] = dict.fromkeys(ComparisonGroup._fields, "") | {"tokens": 0}


def group_cells(cells: Sequence[Row], *alike: str) -> dict[ComparisonGroup, list[Row]]:
    """Cells of each group, in order of appearance.

    Args:
        alike: fields that may differ inside a group; they are empty in its key.
    """
    groups: dict[ComparisonGroup, list[Row]] = {}
    for row in cells:
        fields = {name: row.get(name, "") for name in ComparisonGroup._fields if name not in alike}
        group = ComparisonGroup(**(_BLANK | fields))
        groups.setdefault(group, []).append(row)
    return groups


def group_titles(groups: Sequence[ComparisonGroup], *always: str) -> dict[ComparisonGroup, str]:
    """Title of each group: its task, and the fields that differ between groups.

    Args:
        always: fields that are included even if they are equal.
    """
    varied = {
        name for name in ComparisonGroup._fields if len({getattr(g, name) for g in groups}) > 1
    }
    varied |= set(always)
    tasks = {group.task for group in groups}
    names = Counter(_name(task) for task in tasks)
    return {group: _title(group, varied, names[_name(group.task)] == 1) for group in groups}


def comparable_sheets(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that one figure can show, of one study, model and measure, by a distinguishing title.

    The title is empty if there is only one family.
    """
    by_key: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_key.setdefault(tuple(row.get(name, "") for name in _FAMILY), []).append(row)
    varied = [len({key[index] for key in by_key}) > 1 for index in range(len(_FAMILY))]
    return {_label(key, varied): group for key, group in by_key.items()}


def repeat_unmatched(rows: Sequence[Row]) -> list[Row]:
    """Exhibits, with those of policies without a budget repeated for every matched quantity.

    They are equal there and were measured once.
    """
    by_key = {exhibit_key(row): row for row in rows}
    matched_quantities: dict[tuple[Any, ...], dict[str, None]] = {}
    for row in rows:
        matched_quantities.setdefault(_conditions(row), {})[row.get("matched", "")] = None
    for row in rows:
        if row["budget"] not in (WHOLE, OWN):
            continue
        for matched in matched_quantities[_conditions(row)]:
            repeated = row | {"matched": matched}
            by_key.setdefault(exhibit_key(repeated), repeated)
    return list(by_key.values())


def by_policy_and_budget(rows: Sequence[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """Rows of each policy and budget, by seed; of several rows the last one counts."""
    by_key: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        by_key.setdefault((row["policy"], row["budget"]), {})[row["seed"]] = row
    return by_key


def scores_by_seed(rows: Mapping[int, Row], score: str, kind: str = "") -> ScoresBySeed:
    """Scores of all scored items by seed; files without any are left out.

    Args:
        score: field of the items.
        kind: kind of the items; empty for all.
    """
    by_key: dict[int, Sequence[float]] = {}
    for seed, row in rows.items():
        items = [item for item in counted_items(row) if not kind or item.get("kind") == kind]
        if scores := [float(item[score]) for item in items if _is_number(item.get(score))]:
            by_key[seed] = scores
    return by_key


def counted_items(row: Row) -> list[Row]:
    """Scored items of a row."""
    return [item for item in row.get("items", ()) if item.get("counts", True)]


def main_scores(rows: Sequence[Row]) -> list[str]:
    """Main scores that the rows have."""
    known = _known(rows)
    return [name for name in MAIN if name in known] or known[:1]


def missing_score_error(figure: str, score: str, rows: Sequence[Row]) -> InputError | None:
    """Error for a score that no item has; None if the score exists or there are no items."""
    known = _known(rows)
    if not any(counted_items(row) for row in rows) or score in known:
        return None
    return InputError(
        f"The items have no score {score!r}: they have {', '.join(known) or 'none'}; name one of "
        f'them, as in {figure}(score="{known[0] if known else "exact"}").'
    )


def mean_interval(files: ScoresBySeed) -> Interval:
    """Mean over items with its interval over files, or over the items of a single file."""
    return Bootstrap().mean(resampling_units([list(scores) for scores in files.values()]))


def score_title(score: str) -> str:
    """Label of a score on axes and in tables."""
    return SCORES.get(score, score.replace("_", " "))


def capitalize(text: str) -> str:
    """Text with its first letter capitalized; the rest is unchanged."""
    return text[:1].upper() + text[1:]


def _conditions(row: Row) -> tuple[Any, ...]:
    """Key of a measurement without the matched quantity."""
    return tuple(row.get(name, "") for name in _FAMILY if name != "matched")


def _known(rows: Sequence[Row]) -> list[str]:
    """Scores that items have, by the first item of each row."""
    items = [item for row in rows for item in counted_items(row)[:1]]
    return [name for name in SCORES if any(_is_number(item.get(name)) for item in items)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _title(group: ComparisonGroup, varied: Collection[str], is_alone: bool) -> str:
    """Title of a group; its task is named without parameters if the name is unique."""
    parts = [_name(group.task) if is_alone else group.task.replace('"', "")]
    if group.tokens and ("tokens" in varied or not varied):
        parts.append(f"{group.tokens:,} tokens")
    parts += [group.model] if "model" in varied else []
    parts += [group.study] if "study" in varied and group.study else []
    parts += [f"equal {group.matched}"] if "matched" in varied and group.matched else []

    others = ("measure", "device", "dtype", "question", "wording")
    parts += [
        _condition(name, getattr(group, name))
        for name in others
        if name in varied and getattr(group, name)
    ]
    return ", ".join(parts)


def _label(key: Sequence[str], varied: Sequence[bool]) -> str:
    fields = zip(_FAMILY, key, varied, strict=True)
    shown = [(name, word) for name, word, is_varied in fields if word and is_varied]
    return ", ".join(_condition(name, word) for name, word in shown)


def _condition(name: str, word: str) -> str:
    """Value of a field as titles write it."""
    return _NAMED.get(name, "{}").format(word)


def matched_title(matched: str) -> str:
    """Matched quantity, for captions."""
    return EQUAL.get(matched, "tokens per kv head")


def count_noun(count: int, noun: str) -> str:
    """Number with its noun."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def join_words(*words: str) -> str:
    """Nonempty words joined by commas."""
    return ", ".join(word for word in words if word)


def _name(task: str) -> str:
    return task.partition("(")[0]
