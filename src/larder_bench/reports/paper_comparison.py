"""Comparison of a paper's reported values with measured ones.

Ours is a mean with its bootstrap interval over what was read, of those cells that a value of the
paper names. Beside exact match stands the log-likelihood of the same answers, which has no floor.
Nothing here needs a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from larder.evaluation.bootstrap import Bootstrap, Interval
from larder_bench.results.budget_labels import OWN, WHOLE
from larder_bench.results.papers import CellCost, Paper, ReportedValue, paper_budget
from larder_bench.results.rows import Row
from larder_bench.results.tables import cell_scores, cell_seconds, resampling_units

HEAD = ("policy", "budget", "the paper", "ours is")
HERE = "here ({})"  # of a model
LIKELY = "log-likelihood per token here ({}), nats"
EXACT, LIKELIHOOD = "exact", "log_likelihood"
Scores = Mapping[str, Sequence[float]]  # of all that count, by what was read


@dataclass(frozen=True)
class PaperComparison:
    """A figure of a paper, and ours by model; none where nothing was measured.

    Args:
        refused: models under which the policy refused.
        log_likelihoods: the log-likelihood of the same answers, where ours is exact match.
    """

    reported: ReportedValue
    ours: Mapping[str, Interval]
    refused: Collection[str] = ()
    log_likelihoods: Mapping[str, Interval] = field(default_factory=dict[str, Interval])

    def cells(
        self, models: Sequence[str], likely: Sequence[str], names: Mapping[str, str]
    ) -> list[str]:
        """Of a table, as `heads` names them.

        Args:
            likely: models of which log-likelihoods are told, too.
            names: that policies have in tables.
        """
        policy = names.get(self.reported.policy, self.reported.policy)
        place = policy, paper_budget(self.reported.budget), self.told(), self.over(names)
        sign = "+" if self.reported.above else ""
        beside = [
            _format_interval(self.log_likelihoods[m], 2, sign) if m in self.log_likelihoods else ""
            for m in likely
        ]
        return [*place, *(self.measured_text(model, names) for model in models), *beside]

    def told(self) -> str:
        """Value of the paper."""
        value, said = self.reported.paper, self.reported.says
        number = value if isinstance(value, str) else f"{value:g}"
        shown = f"{number} {self.reported.unit}".strip()
        return f"{shown} ({said})" if said else shown

    def over(self, names: Mapping[str, str]) -> str:
        """Cells that the measured value is a mean of."""
        one = self.reported
        times = f", times that of {names.get(one.against, one.against)}" if one.against else ""
        times += f", less that of {names.get(one.above, one.above)}" if one.above else ""
        length = f"{one.tokens} tokens" if one.tokens else ""
        parts = [part for part in (one.task, length, one.kind) if part]
        return f"{one.on.title}{times}; {', '.join(parts) or 'all tasks'}"

    def measured_text(self, model: str, names: Mapping[str, str]) -> str:
        """Ours with its interval, which one number alone has not."""
        one = self.reported
        if model not in self.ours:
            missing = "refused" if model in self.refused else "not measured"
            other = names.get(one.against or "", one.against)
            return f"no ratio: {other} has none or 0" if one.against else missing
        digits, sign = 2 if one.against else one.on.digits, "+" if one.above else ""
        return _format_interval(self.ours[model], digits, sign, "×" if one.against else "")


def compare_with_paper(paper: Paper, rows: Sequence[Row]) -> list[PaperComparison]:
    """All figures of a paper, with those of the cells of its study."""
    models = dict.fromkeys(row["model"] for row in rows)
    lines: list[PaperComparison] = []
    for value in paper.values:
        by_model = {
            m: _measured_interval(value, [r for r in rows if r["model"] == m]) for m in models
        }
        found = {model: ours for model, ours in by_model.items() if ours is not None}
        mine = [row for row in rows if _matches_value(row, value, value.policy, value.budget)]
        refused = {row["model"] for row in mine if "refused" in row}
        lines.append(PaperComparison(value, found, refused, _likely(value, rows, models)))
    return lines


def comparison_table(
    lines: Sequence[PaperComparison], models: Sequence[str], names: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """The head of a table and its cells, line by line."""
    likely = [model for model in models if any(model in one.log_likelihoods for one in lines)]
    head = [*HEAD, *map(HERE.format, models), *map(LIKELY.format, likely)]
    return head, [one.cells(models, likely, names) for one in lines]


def comparison_markdown(paper: Paper, rows: Sequence[Row], names: Mapping[str, str]) -> str:
    """A table in Markdown, and what differs.

    Args:
        names: that policies have in tables.
    """
    head, lines = comparison_table(
        compare_with_paper(paper, rows), list(dict.fromkeys(r["model"] for r in rows)), names
    )
    shown = (
        [_markdown_row(head), _markdown_row(["---"] * len(head)), *map(_markdown_row, lines)]
        if lines
        else []
    )
    differs = ["What differs here:", "", *(f"- {one}" for one in paper.differs), ""]
    told = [f"## {paper.cite}", "", f"The paper: {paper.setup}", "", *shown, ""]
    return "\n".join([*told, *(differs if paper.differs else ())])


def comparison_document(paper: Paper, rows: Sequence[Row]) -> Row:
    """Comparison as plain dictionaries."""
    values = [
        {key: own for key, own in asdict(one.reported).items() if own not in (None, "")}
        | {"here": {model: asdict(ours) for model, ours in one.ours.items()}}
        for one in compare_with_paper(paper, rows)
    ]
    told = {"cite": paper.cite, "setup": paper.setup, "differs": list(paper.differs)}
    return told | {"values": values}


def _measured_interval(value: ReportedValue, rows: Sequence[Row]) -> Interval | None:
    own = _scores(value, rows, value.policy, (value.budget,))
    if not (than := value.against or value.above):
        return Bootstrap().mean(resampling_units(list(own.values()))) if own else None
    other = _scores(value, rows, than, (value.budget, WHOLE, OWN))
    both = [source for source in own if source in other]
    first, second = [own[source] for source in both], [other[source] for source in both]
    if value.above:
        return (
            Bootstrap().difference(resampling_units(first), resampling_units(second))
            if both
            else None
        )
    return Bootstrap().ratio(first, second) if sum(map(sum, second)) > 0 else None


def _likely(
    value: ReportedValue, rows: Sequence[Row], models: Iterable[str]
) -> dict[str, Interval]:
    """Log-likelihoods beside exact match, by model; a ratio of them would say nothing."""
    if value.scale != EXACT or value.against:
        return {}
    other = replace(value, scale=LIKELIHOOD)
    found = {
        model: _measured_interval(other, [r for r in rows if r["model"] == model])
        for model in models
    }
    return {model: ours for model, ours in found.items() if ours is not None}


def _scores(
    value: ReportedValue, rows: Sequence[Row], policy: str, budgets: Sequence[str]
) -> dict[str, list[float]]:
    """The last row of each thing that was read counts; at the first of the budgets that it has."""
    found: dict[str, list[float]] = {}
    for budget in reversed(budgets):
        for row in rows:
            if _matches_value(row, value, policy, budget) and (
                scores := list(_values_of_cell(value, row))
            ):
                found[cell_scores(row).source] = scores
    return found


def _matches_value(row: Row, value: ReportedValue, policy: str, budget: str) -> bool:
    """Test if a cell is part of the measured value."""
    wanted = {"task": value.task, "tokens": value.tokens}
    wanted |= {"measure": value.measure, "matched": value.matched}
    told = {name: own for name, own in wanted.items() if own is not None}
    told |= {"policy": policy, "budget": budget}
    return all(row[name] == own for name, own in told.items())


def _values_of_cell(value: ReportedValue, row: Row) -> Iterator[float]:
    """The numbers of a cell on a scale."""
    scale = value.on
    if isinstance(scale, CellCost):
        told = row | cell_seconds(row)
        if "refused" not in row and scale.key in told:
            yield told[scale.key] / scale.unit
        return
    for item in cell_scores(row).items:
        if item.get(scale.key) is not None and value.kind in (None, item.get("kind")):
            yield float(item[scale.key])


def _format_interval(found: Interval, digits: int, sign: str = "", times: str = "") -> str:
    mean, low, high = (f"{x:{sign}.{digits}f}" for x in (found.mean, found.low, found.high))
    mean += times
    return mean if found.low == found.high else f"{mean} [{low}, {high}]"


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)  # a bar would end the cell
    return f"| {' | '.join(escaped)} |"
