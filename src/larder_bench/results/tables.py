"""Markdown tables of measured scores: means with confidence intervals.

Intervals are bootstrap intervals over conversations, or over items if there is only one. Cells that
either of two policies refused are left out of their difference. Nothing here needs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from larder.evaluation import Bootstrap, Interval, drop_unpaired, questions_as_clusters
from larder_bench.results.budget_labels import WHOLE, sort_budgets
from larder_bench.results.rows import Row


@dataclass(frozen=True)
class ItemScale:
    """Score that each item has.

    Args:
        key: field of an item.
        title: heading in tables.
        digits: decimal places.
    """

    key: str
    title: str
    digits: int


@dataclass(frozen=True)
class CellScores:
    """Scores of one policy on one file at one budget.

    Args:
        source: conversation that was read; policies are compared in pairs on each.
        items: scored items; empty if the policy refused.
        bytes_share: share of the full cache's bytes that was held, dense layers included.
        dense_share: share held by layers that the budget does not cover.
        why: reason of the refusal.
        seconds: durations, by the names of `TIMES`.
        budget_tokens: budget in entries per kv head; 0 without a budget.
    """

    policy: str
    budget: str
    source: str
    items: tuple[Row, ...] = ()
    bytes_share: float = 0.0
    is_refused: bool = False
    why: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    budget_tokens: int = 0
    dense_share: float = 0.0


# Fields with durations in seconds, and their titles.
TIMES = {
    "embed_seconds": "embedding",
    "cluster_seconds": "clustering",
    "prefill_seconds": "prefill",
    "first_token_p50": "first token, median",
    "first_token_p95": "first token, p95",
    "token_p50": "token, median",
    "token_p95": "token, p95",
    "match_seconds": "matching",
    "retrieve_seconds": "fetching a cache",
    "decode_seconds": "answering",
    "turn_seconds": "a turn, all shared out",
    "uncached_turn_seconds": "a turn read anew",
}
SPEED = ItemScale("tokens_per_second", "Tokens per second", digits=1)
SHARE = ItemScale("policy_share", "Share of the time that the policy takes", digits=3)
COSTS = (SPEED, SHARE)  # of a whole cell
SCALES = (
    ItemScale("exact", "Exact match", digits=2),
    ItemScale("f1", "F1", digits=2),
    ItemScale("f1_stemmed", "F1 of stemmed words, as LoCoMo scores", digits=2),
    ItemScale("own", "Score of the data set", digits=2),
    ItemScale("log_likelihood", "Log-likelihood per token (nats)", digits=2),
    ItemScale("similarity", "Cosine of keys with and without block-wise eviction", digits=3),
    ItemScale("kl", "KL(full || policy) per token (nats, less is better)", digits=3),
    ItemScale("same", "Likeliest token is the same", digits=3),
    ItemScale("recall_1", "Recall@1: the largest product is among what was fetched", digits=3),
    ItemScale("recall_3", "Recall@3", digits=3),
    ItemScale("recall_5", "Recall@5", digits=3),
    ItemScale("mass", "Attention kept", digits=3),
    ItemScale("possible", "Attention kept, had as many been fetched one by one", digits=3),
    *COSTS,
)


def cell_scores(row: Row) -> CellScores:
    """Scores of a cell's row."""
    items = tuple(item for item in row.get("items", ()) if item["counts"])
    if costs := {scale.key: row[scale.key] for scale in COSTS if scale.key in row}:
        items = (costs,)
    source = f"{row['task']} {row['tokens']} {row['seed']}"
    dense = row["dense_kv_bytes"] / row["full_kv_bytes"] if "dense_kv_bytes" in row else 0.0
    return CellScores(
        policy=row["policy"],
        budget=row["budget"],
        source=source,
        items=items,
        bytes_share=row.get("bytes_share", 0.0),
        is_refused="refused" in row,
        why=row.get("refused", ""),
        seconds=cell_seconds(row),
        budget_tokens=row.get("budget_tokens", 0),
        dense_share=dense,
    )


def cell_seconds(row: Row) -> dict[str, float]:
    """Timings of a cell; empty if it was not timed."""
    timings = {name: row[name] for name in TIMES if name in row}
    for what, shares in row.get("latency", {}).items():
        timings |= {f"{what}_{share}": seconds for share, seconds in shares.items()}
    return timings


def markdown_report(groups: Mapping[str, Sequence[CellScores]]) -> str:
    """Markdown tables of all policies, per group and scale."""
    lines: list[str] = []
    for group, entries in groups.items():
        table = ScoreTable(entries)
        if not table.names:
            continue
        lines += [f"## {group}", "", table.count_label(), "", *table.refusals()]
        for scale in table.scales_with_data(SCALES):
            lines += [f"### {scale.title}", "", *table.means(scale), ""]
        lines += table.seconds_table()
    return "\n".join(lines)


class ScoreTable:
    """Scores of one group by policy and budget; the last entry of a cell counts."""

    def __init__(self, entries: Sequence[CellScores]) -> None:
        self._entries = {(one.policy, one.budget, one.source): one for one in entries}
        self.names = list(dict.fromkeys(one.policy for one in entries))
        self.budgets = sort_budgets(list(dict.fromkeys(one.budget for one in entries)))
        self._sources = sorted({one.source for one in entries})

    def count_label(self) -> str:
        """Number of files, and of scored items of the policy that refused fewest; which policies
        were measured on fewer files.
        """
        items = [self._items(name, budget) for name in self.names for budget in self.budgets]
        most = max(sum(map(len, by_source.values())) for by_source in items)
        files, fewer = _num_files(len(self._sources)), self._fewer_files()
        if set(self.scales_with_data(SCALES)) <= {*COSTS}:
            return f"{files}{fewer}."
        return f"{files}, {most} {'scored item' if most == 1 else 'scored items'}{fewer}."

    def _fewer_files(self) -> str:
        """Policies that were measured on a part of the files, in parentheses; empty for none."""
        measured: dict[str, set[str]] = {name: set() for name in self.names}
        for name, _, source in self._entries:
            measured[name].add(source)
        by_count: dict[int, list[str]] = {}
        for name, sources in measured.items():
            if len(sources) < len(self._sources):
                by_count.setdefault(len(sources), []).append(name)
        notes = [f"{', '.join(by_count[n])} on {_num_files(n)}" for n in sorted(by_count)]
        return f" ({'; '.join(notes)})" if notes else ""

    def refusals(self) -> list[str]:
        """Lines with the first refusal of each policy and its reason."""

        reasons: dict[str, str] = {}
        for one in self._entries.values():
            if one.why:
                reasons.setdefault(one.policy, f"- {one.policy} at {one.budget} refused: {one.why}")
        return [*reasons.values(), ""] if reasons else []

    def seconds_table(self) -> list[str]:
        """Table of mean seconds per policy and budget; empty if nothing was timed."""
        columns = self.timed_fields()
        if not columns:
            return []
        lines = [_markdown_row("policy", "budget", *(TIMES[name] for name in columns))]
        lines.append(_markdown_row(*["---"] * (2 + len(columns))))
        for name in self.names:
            for budget in self.budgets:
                if seconds := self.seconds(name, budget):
                    cells = (f"{seconds[one]:.4f}" if one in seconds else "" for one in columns)
                    lines.append(_markdown_row(name, budget, *cells))
        return ["### Seconds", "", *lines, ""]

    def timed_fields(self) -> list[str]:
        """Names of `TIMES` that any entry has."""
        entries = self._entries.values()
        return [name for name in TIMES if any(name in one.seconds for one in entries)]

    def seconds(self, name: str, budget: str) -> dict[str, float]:
        """Mean durations of a policy at a budget, by the names of `TIMES`."""
        cells = (self._entries.get((name, budget, source)) for source in self._sources)
        timings = [one.seconds for one in cells if one is not None and one.seconds]
        by_field = {key: [each[key] for each in timings if key in each] for key in TIMES}
        return {key: sum(values) / len(values) for key, values in by_field.items() if values}

    def scales_with_data(self, scales: Sequence[ItemScale]) -> list[ItemScale]:
        """Scales for which any item has a number."""
        items = [item for one in self._entries.values() for item in one.items[:1]]
        return [s for s in scales if any(item.get(s.key) is not None for item in items)]

    def means(self, scale: ItemScale) -> list[str]:
        """Table of means per policy with interval, and in parentheses the share of the bytes
        held.
        """
        lines = [
            _markdown_row("policy", *self.budgets),
            _markdown_row(*["---"] * (1 + len(self.budgets))),
        ]
        for name in self.names:
            lines.append(_markdown_row(name, *(self._mean(scale, name, b) for b in self.budgets)))
        return lines

    def interval(self, scale: ItemScale, name: str, budget: str) -> Interval | None:
        """Mean of a policy's items at a budget, with its interval; None without items."""
        scores = [
            [float(item[scale.key]) for item in items if item.get(scale.key) is not None]
            for items in self._items(name, budget).values()
        ]
        scores = [values for values in scores if values]
        return Bootstrap().mean(resampling_units(scores)) if scores else None

    def difference(self, scale: ItemScale, first: str, second: str, budget: str) -> Interval | None:
        """Paired difference, first less second, on items that both scored; None without any.

        A policy without cells at the budget, such as the full cache, stands with its whole cache.
        """
        minuends, subtrahends = (
            self._items(name, budget) or self._items(name, WHOLE) for name in (first, second)
        )
        pairs = [
            drop_unpaired(
                [item.get(scale.key) for item in minuends[source]],
                [item.get(scale.key) for item in subtrahends[source]],
            )
            for source in minuends
            if source in subtrahends
        ]
        left = [scores for scores, _ in pairs if scores]
        right = [scores for _, scores in pairs if scores]
        if not left or not right:
            return None
        return Bootstrap().difference(resampling_units(left), resampling_units(right))

    def bytes_share(self, name: str, budget: str) -> float:
        """Mean share of the full cache's bytes, over cells that were not refused."""
        return _mean_of([one.bytes_share for one in self._scored(name, budget)])

    def dense_share(self, name: str, budget: str) -> float:
        """Mean share held by dense layers, over cells that were not refused."""
        return _mean_of([one.dense_share for one in self._scored(name, budget)])

    def shares(self, name: str, budget: str) -> str:
        """Both shares, formatted for tables."""
        dense, share = self.dense_share(name, budget), f"{self.bytes_share(name, budget):.3f}"
        return f"{share}, {dense:.3f} in dense layers" if dense else share

    def budget_tokens(self, name: str, budget: str) -> int:
        """Mean budget in entries per kv head, over cells that were not refused."""
        return round(_mean_of([float(one.budget_tokens) for one in self._scored(name, budget)]))

    def refused(self, name: str, budget: str) -> int:
        """Number of refused cells."""
        cells = (self._entries.get((name, budget, source)) for source in self._sources)
        return sum(one is not None and one.is_refused for one in cells)

    def _mean(self, scale: ItemScale, name: str, budget: str) -> str:
        interval, refused = self.interval(scale, name, budget), self.refused(name, budget)
        if interval is None:
            return "refused" if refused else ""
        note = f" ({refused} refused)" if refused else ""
        formatted = _format_interval(interval, scale.digits)
        return f"{formatted} ({self.shares(name, budget)}){note}"

    def _scored(self, name: str, budget: str) -> list[CellScores]:
        return [self._entries[name, budget, source] for source in self._items(name, budget)]

    def _items(self, name: str, budget: str) -> dict[str, tuple[Row, ...]]:
        """Scored items by source, without cells that were refused or have none."""
        cells = {source: self._entries.get((name, budget, source)) for source in self._sources}
        return {source: one.items for source, one in cells.items() if one is not None and one.items}


def _num_files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"


def resampling_units(files: list[list[float]]) -> list[list[float]]:
    """Clusters of the bootstrap: files, or the items of a single file."""
    return files if len(files) > 1 else questions_as_clusters(files[0])


def _mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _format_interval(interval: Interval, digits: int) -> str:
    mean, low, high = (round(x, digits) + 0.0 for x in (interval.mean, interval.low, interval.high))
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _markdown_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
