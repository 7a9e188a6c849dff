"""Groups of cells that answer the same questions, and their mean scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from larder.core.errors import InputError
from larder.evaluation.bootstrap import Bootstrap, Interval
from larder_bench.results.budget_labels import OWN, WHOLE
from larder_bench.results.rows import Row, exhibit_key
from larder_bench.results.tables import resampling_units

ScoresBySeed = Mapping[int, Sequence[float]]  # by seed, the scores of a file's items
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
# Those that are drawn where none is named, as far as items have them.
MAIN = ("exact", "own", "kl", "same", "mass")
BOUNDED = frozenset({"exact", "f1", "f1_stemmed", "own", "same", "mass"})  # to [0, 1]


class ComparisonGroup(NamedTuple):
    """Cells that differ in policy, budget and seed alone."""

    study: str
    model: str
    task: str
    tokens: int
    matched: str
    measure: str
    device: str = ""
    dtype: str = ""


_FAMILY = ("study", "model", "matched", "measure", "device", "dtype")
EQUAL = {"bytes": "bytes of the cache that answers", "total": "bytes of all caches together"}
_BLANK: dict[str, Any] = dict.fromkeys(ComparisonGroup._fields, "") | {"tokens": 0}


def group_cells(cells: Sequence[Row], *alike: str) -> dict[ComparisonGroup, list[Row]]:
    """The cells of each group, in the order in which they came.

    Args:
        alike: fields that may differ inside a group; they are empty in its name.
    """
    found: dict[ComparisonGroup, list[Row]] = {}
    for row in cells:
        own = {name: row.get(name, "") for name in ComparisonGroup._fields if name not in alike}
        group = ComparisonGroup(**(_BLANK | own))
        found.setdefault(group, []).append(row)
    return found


def group_titles(groups: Sequence[ComparisonGroup], *always: str) -> dict[ComparisonGroup, str]:
    """A few words for each group: its task, and whatever else tells it from the others.

    Args:
        always: fields that are told even where they tell none from another.
    """
    varied = {
        name for name in ComparisonGroup._fields if len({getattr(g, name) for g in groups}) > 1
    }
    varied |= set(always)
    tasks = {group.task for group in groups}
    names = Counter(_name(task) for task in tasks)
    return {group: _title(group, varied, names[_name(group.task)] == 1) for group in groups}


def comparable_sheets(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that one sheet can show: of one study and model, measured in one way.

    By a few words that tell them apart; by nothing where there is one family only.
    """
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name, "") for name in _FAMILY), []).append(row)
    varied = [len({key[place] for key in found}) > 1 for place in range(len(_FAMILY))]
    return {_label(key, varied): own for key, own in found.items()}


def repeat_unmatched(rows: Sequence[Row]) -> list[Row]:
    """Exhibits, and those of what chooses no budget once more beside whatever is held equal.

    They are the same there, and were measured once.
    """
    found = {exhibit_key(row): row for row in rows}
    held: dict[tuple[Any, ...], dict[str, None]] = {}
    for row in rows:
        held.setdefault(_conditions(row), {})[row.get("matched", "")] = None
    for row in rows:
        for matched in held[_conditions(row)] if row["budget"] in (WHOLE, OWN) else ():
            again = row | {"matched": matched}
            found.setdefault(exhibit_key(again), again)
    return list(found.values())


def by_policy_and_budget(rows: Sequence[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """The rows of each policy and budget, by seed; of rows for the same the last counts."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        found.setdefault((row["policy"], row["budget"]), {})[row["seed"]] = row
    return found


def scores_by_seed(rows: Mapping[int, Row], score: str, kind: str = "") -> ScoresBySeed:
    """By seed, the scores of all items that count and have one; files without any are left out.

    Args:
        score: its name in the items.
        kind: of the items; empty for all.
    """
    found: dict[int, Sequence[float]] = {}
    for seed, row in rows.items():
        items = [item for item in counted_items(row) if not kind or item.get("kind") == kind]
        if own := [float(item[score]) for item in items if _is_number(item.get(score))]:
            found[seed] = own
    return found


def counted_items(row: Row) -> list[Row]:
    """The items of a row that count."""
    return [item for item in row.get("items", ()) if item.get("counts", True)]


def main_scores(rows: Sequence[Row]) -> list[str]:
    """The scores that tell most of what was measured."""
    known = _known(rows)
    return [name for name in MAIN if name in known] or known[:1]


def missing_score_error(figure: str, score: str, rows: Sequence[Row]) -> InputError | None:
    """The error for a score that no item has, where there are items; None where there are none."""
    known = _known(rows)
    if not any(counted_items(row) for row in rows) or score in known:
        return None
    return InputError(
        f"The items have no score {score!r}: they have {', '.join(known) or 'none'}; name one of "
        f'them, as in {figure}(score="{known[0] if known else "exact"}").'
    )


def mean_interval(files: ScoresBySeed) -> Interval:
    """The mean over items with its interval over files, or over the items of the only file."""
    return Bootstrap().mean(resampling_units([list(own) for own in files.values()]))


def score_title(score: str) -> str:
    """Label of a score on axes and in tables."""
    return SCORES.get(score, score.replace("_", " "))


def capitalize(text: str) -> str:
    """The text with a capital letter at its start; names in it keep theirs."""
    return text[:1].upper() + text[1:]


def _conditions(row: Row) -> tuple[Any, ...]:
    """Name of the measure, independent of the matched quantity."""
    return tuple(row.get(name, "") for name in _FAMILY if name != "matched")


def _known(rows: Sequence[Row]) -> list[str]:
    """The scores that items have, by the first of each row."""
    items = [item for row in rows for item in counted_items(row)[:1]]
    return [name for name in SCORES if any(_is_number(item.get(name)) for item in items)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _title(group: ComparisonGroup, varied: Collection[str], is_alone: bool) -> str:
    """A task goes by its name where no other has it, else by its parameters, too."""
    parts = [_name(group.task) if is_alone else group.task.replace('"', "")]
    if group.tokens and ("tokens" in varied or not varied):
        parts.append(f"{group.tokens:,} tokens")
    parts += [group.model] if "model" in varied else []
    parts += [group.study] if "study" in varied and group.study else []
    parts += [f"equal {group.matched}"] if "matched" in varied and group.matched else []
    told = ("measure", "device", "dtype")
    parts += [getattr(group, name) for name in told if name in varied and getattr(group, name)]
    return ", ".join(parts)


def _label(key: Sequence[str], varied: Sequence[bool]) -> str:
    named = zip(_FAMILY, key, varied, strict=True)
    told = [(name, word) for name, word, is_told in named if word and is_told]
    return ", ".join(f"equal {word}" if name == "matched" else word for name, word in told)


def matched_title(matched: str) -> str:
    """Matched quantity, for captions."""
    return EQUAL.get(matched, "tokens per kv head")


def count_noun(count: int, noun: str) -> str:
    """A count and what is counted."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def join_words(*words: str) -> str:
    """Words of a title with commas between; those that are empty left out."""
    return ", ".join(word for word in words if word)


def _name(task: str) -> str:
    return task.partition("(")[0]
