"""Comparison of a paper's reported values with measured ones.

A measured value is a mean with its bootstrap interval over conversations, of the cells that a value
of the paper selects. Next to exact match is the log-likelihood of the same answers, which has no
floor. Nothing here needs a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from larder.evaluation import Bootstrap, Interval
from larder_bench.results.budget_labels import OWN, WHOLE
from larder_bench.results.papers import (
    DISAMBIGUATING_KEYS,
    CellCost,
    Paper,
    ReportedValue,
    paper_budget,
)
from larder_bench.results.rows import Row
from larder_bench.results.tables import cell_items, cell_seconds, resampling_units, source_label

HEAD = ("policy", "budget", "the paper", "ours is")
HERE = "here ({})"  # of a model
LIKELY = "log-likelihood per token here ({}), nats"
EXACT, LIKELIHOOD = "exact", "log_likelihood"
Scores = Mapping[str, Sequence[float]]  # of all scored items, by conversation


@dataclass(frozen=True)
class PaperComparison:
    """Reported value, and the measured values by model; none if nothing was measured.

    Args:
        refused: models with which the policy refused.
        log_likelihoods: log-likelihoods of the same answers, if the scale is exact match.
    """

    reported: ReportedValue
    measured: Mapping[str, Interval]
    refused: Collection[str] = ()
    log_likelihoods: Mapping[str, Interval] = field(default_factory=dict[str, Interval])

    def cells(
        self, models: Sequence[str], likely: Sequence[str], names: Mapping[str, str]
    ) -> list[str]:
        """Cells of a table line, in the order of `comparison_table`'s head.

        Args:
            likely: models with log-likelihoods.
            names: labels of policies.
        """
        policy = names.get(self.reported.policy, self.reported.policy)
        reported = policy, paper_budget(self.reported.budget), self.reported_text()
        sign = "+" if self.reported.above else ""
        log_likelihoods = [
            _format_interval(self.log_likelihoods[m], 2, sign) if m in self.log_likelihoods else ""
            for m in likely
        ]
        measured = [self.measured_text(model, names) for model in models]
        return [*reported, self.scale_text(names), *measured, *log_likelihoods]

    def reported_text(self) -> str:
        """Value of the paper with its unit and its place there."""
        value, passage = self.reported.paper, self.reported.says
        number = value if isinstance(value, str) else f"{value:g}"
        text = f"{number} {self.reported.unit}".strip()
        return f"{text} ({passage})" if passage else text

    def scale_text(self, names: Mapping[str, str]) -> str:
        """Scale of the measured value, and the cells that it is a mean of."""
        one = self.reported
        times = f", times that of {names.get(one.against, one.against)}" if one.against else ""
        times += f", less that of {names.get(one.above, one.above)}" if one.above else ""
        length = f"{one.tokens} tokens" if one.tokens else ""
        parts = [part for part in (one.task, length, one.kind) if part]
        return f"{one.measured_scale.title}{times}; {', '.join(parts) or 'all tasks'}"

    def measured_text(self, model: str, names: Mapping[str, str]) -> str:
        """Measured value with its interval."""
        one = self.reported
        if model not in self.measured:
            missing = "refused" if model in self.refused else "not measured"
            other = names.get(one.against or "", one.against)
            return f"no ratio: {other} has none or 0" if one.against else missing
        digits, sign = 2 if one.against else one.measured_scale.digits, "+" if one.above else ""
        return _format_interval(self.measured[model], digits, sign, "×" if one.against else "")


def compare_with_paper(paper: Paper, rows: Sequence[Row]) -> list[PaperComparison]:
    """All values of a paper with the measured ones of its study."""
    models = dict.fromkeys(row["model"] for row in rows)
    lines: list[PaperComparison] = []
    for value in paper.values:
        by_model = {
            m: _measured_interval(value, [r for r in rows if r["model"] == m]) for m in models
        }
        measured = {model: interval for model, interval in by_model.items() if interval is not None}
        matching = _matching_rows(rows, value, value.policy, value.budget)
        refused = {row["model"] for row in matching if "refused" in row}
        lines.append(PaperComparison(value, measured, refused, _likely(value, rows, models)))
    return lines


def comparison_table(
    lines: Sequence[PaperComparison], models: Sequence[str], names: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a comparison table."""
    likely = [model for model in models if any(model in one.log_likelihoods for one in lines)]
    head = [*HEAD, *map(HERE.format, models), *map(LIKELY.format, likely)]
    return head, [one.cells(models, likely, names) for one in lines]


def comparison_markdown(paper: Paper, rows: Sequence[Row], names: Mapping[str, str]) -> str:
    """Comparison as a Markdown table, with the differences.

    Args:
        names: labels of policies.
    """
    head, lines = comparison_table(
        compare_with_paper(paper, rows), list(dict.fromkeys(r["model"] for r in rows)), names
    )
    table = (
        [_markdown_row(head), _markdown_row(["---"] * len(head)), *map(_markdown_row, lines)]
        if lines
        else []
    )
    differs = ["What differs here:", "", *(f"- {one}" for one in paper.differs), ""]
    heading = [f"## {paper.cite}", "", f"The paper: {paper.setup}", "", *table, ""]
    return "\n".join([*heading, *(differs if paper.differs else ())])


def comparison_document(paper: Paper, rows: Sequence[Row]) -> Row:
    """Comparison as plain dictionaries, for JSON."""
    values = [
        {key: field for key, field in asdict(one.reported).items() if field not in (None, "")}
        | {"here": {model: asdict(interval) for model, interval in one.measured.items()}}
        for one in compare_with_paper(paper, rows)
    ]
    document = {"cite": paper.cite, "setup": paper.setup, "differs": list(paper.differs)}
    return document | {"values": values}


def _measured_interval(value: ReportedValue, rows: Sequence[Row]) -> Interval | None:
    scores = _scores(value, rows, value.policy, (value.budget,))
    if not (reference := value.against or value.above):
        return Bootstrap().mean(resampling_units(list(scores.values()))) if scores else None
    other = _scores(value, rows, reference, (value.budget, WHOLE, OWN))
    both = [source for source in scores if source in other]
    first, second = [scores[source] for source in both], [other[source] for source in both]
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
    """Log-likelihoods by model, next to exact match; empty for ratios, where they are
    meaningless.
    """
    if value.scale != EXACT or value.against:
        return {}
    other = replace(value, scale=LIKELIHOOD)

    intervals = {
        model: _measured_interval(other, [r for r in rows if r["model"] == model])
        for model in models
    }
    return {model: interval for model, interval in intervals.items() if interval is not None}


def _scores(
    value: ReportedValue, rows: Sequence[Row], policy: str, budgets: Sequence[str]
) -> dict[str, list[float]]:
    """Scores by conversation: of its last row, at the first of the budgets that it has."""
    interval: dict[str, list[float]] = {}
    for budget in reversed(budgets):
        for row in _matching_rows(rows, value, policy, budget):
            if scores := list(_values_of_cell(value, row)):
                interval[source_label(row)] = scores
    return interval


def _matching_rows(
    rows: Sequence[Row], value: ReportedValue, policy: str, budget: str
) -> list[Row]:
    """Cells that are part of the measured value."""
    selection = {"task": value.task, "tokens": value.tokens}
    selection |= {name: getattr(value, name) for name in DISAMBIGUATING_KEYS}
    fields = {name: field for name, field in selection.items() if field is not None}
    fields |= {"policy": policy, "budget": budget}
    names, wanted = list(fields), list(fields.values())
    return [row for row in rows if [row[name] for name in names] == wanted]


def _values_of_cell(value: ReportedValue, row: Row) -> Iterator[float]:
    """Numbers of a cell on the scale of a value."""
    scale = value.measured_scale
    if isinstance(scale, CellCost):
        fields = row | cell_seconds(row)
        if "refused" not in row and scale.key in fields:
            yield fields[scale.key] / scale.unit
        return
    for item in cell_items(row):
        if item.get(scale.key) is not None and value.kind in (None, item.get("kind")):
            yield float(item[scale.key])


def _format_interval(interval: Interval, digits: int, sign: str = "", times: str = "") -> str:
    mean, low, high = (
        f"{x:{sign}.{digits}f}" for x in (interval.mean, interval.low, interval.high)
    )
    mean += times
    return mean if interval.low == interval.high else f"{mean} [{low}, {high}]"


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)  # a bar would end the cell
    return f"| {' | '.join(escaped)} |"
