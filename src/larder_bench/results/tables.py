"""Markdown tables of measured scores: means with confidence intervals.

Intervals are bootstrap intervals over conversations, or over items if there is only one. Cells that
either of two policies refused are left out of their difference. Nothing here needs a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import polars as pl

from larder.evaluation import Bootstrap, Interval, questions_as_clusters
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


def source_label(row: Row) -> str:
    """Conversation that a cell read; policies are compared in pairs on each."""
    return f"{row['task']} {row['tokens']} {row['seed']}"


def cell_items(row: Row) -> list[Row]:
    """Scored items of a cell, or its costs as one item; empty if the policy refused."""
    costs = {scale.key: row[scale.key] for scale in COSTS if scale.key in row}
    return [costs] if costs else [item for item in row.get("items", ()) if item["counts"]]


def cell_seconds(row: Row) -> dict[str, float]:
    """Timings of a cell; empty if it was not timed."""
    timings = {name: row[name] for name in TIMES if name in row}
    for what, shares in row.get("latency", {}).items():
        timings |= {f"{what}_{share}": seconds for share, seconds in shares.items()}
    return timings


def markdown_report(groups: Mapping[str, Sequence[Row]]) -> str:
    """Markdown tables of all policies, per group of cells and scale."""
    lines: list[str] = []
    for group, rows in groups.items():
        table = ScoreTable(rows)
        if not table.names:
            continue
        lines += [f"## {group}", "", table.count_label(), "", *table.refusals()]
        for scale in table.scales_with_data(SCALES):
            lines += [f"### {scale.title}", "", *table.means(scale), ""]
        lines += table.seconds_table()
    return "\n".join(lines)


# Columns of the frame of cells.
_SIZES = ("bytes_share", "dense_share", "budget_tokens")
_CELLS = {
    **dict.fromkeys(("policy", "budget", "source"), pl.String),
    **dict.fromkeys((*_SIZES, *TIMES), pl.Float64),
    "refused": pl.String,
    "num_items": pl.Int64,
}
# Means of the cells of a policy at a budget: sizes of those that were not refused.
_FIGURES = [
    pl.col(_SIZES).filter(pl.col("num_items") > 0).mean(),
    pl.col(*TIMES).mean(),
    pl.col("refused").count(),
    pl.col("num_items").sum(),
]


class ScoreTable:
    """Scores of one group of cells by policy and budget; the last row of a cell counts."""

    def __init__(self, rows: Sequence[Row]) -> None:
        cells = {(row["policy"], row["budget"], source_label(row)): row for row in rows}
        self._items = {key: cell_items(row) for key, row in cells.items()}
        self._cells = pl.DataFrame([_cell_line(row) for row in cells.values()], _CELLS)
        figures = self._cells.group_by("policy", "budget").agg(_FIGURES)
        self._figures = figures.rows_by_key(("policy", "budget"), named=True, unique=True)
        self._pivot = cache(self._new_pivot)
        self.names = list(dict.fromkeys(row["policy"] for row in rows))
        self.budgets = sort_budgets(list(dict.fromkeys(row["budget"] for row in rows)))

    def count_label(self) -> str:
        """Number of files, and of scored items of the policy that refused fewest; which policies
        were measured on fewer files.
        """
        num_files = self._cells["source"].n_unique()
        files, fewer = _num_files(num_files), self._fewer_files(num_files)
        if set(self.scales_with_data(SCALES)) <= {*COSTS}:
            return f"{files}{fewer}."
        most = max(one["num_items"] for one in self._figures.values())
        return f"{files}, {most} {'scored item' if most == 1 else 'scored items'}{fewer}."

    def _fewer_files(self, num_files: int) -> str:
        """Policies that were measured on a part of the files, in parentheses; empty for none."""
        measured = self._cells.group_by("policy", maintain_order=True)
        counts = measured.agg(files=pl.col("source").n_unique())
        fewer = counts.filter(pl.col("files") < num_files).group_by("files", maintain_order=True)
        names = fewer.agg("policy").sort("files").iter_rows()
        notes = [f"{', '.join(policies)} on {_num_files(count)}" for count, policies in names]
        return f" ({'; '.join(notes)})" if notes else ""

    def refusals(self) -> list[str]:
        """Lines with the first refusal of each policy and its reason."""
        refused = self._cells.drop_nulls("refused")
        first = refused.unique("policy", keep="first", maintain_order=True)
        reasons = first.select("policy", "budget", "refused").iter_rows()
        lines = [f"- {policy} at {budget} refused: {why}" for policy, budget, why in reasons]
        return [*lines, ""] if lines else []

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
        return [name for name in TIMES if self._cells[name].count()]

    def seconds(self, name: str, budget: str) -> dict[str, float]:
        """Mean durations of a policy at a budget, by the names of `TIMES`."""
        figures = self._figures.get((name, budget), {})
        return {key: figures[key] for key in TIMES if figures.get(key) is not None}

    def scales_with_data(self, scales: Sequence[ItemScale]) -> list[ItemScale]:
        """Scales for which the first item of any cell has a number."""
        first = [items[0] for items in self._items.values() if items]
        return [one for one in scales if any(item.get(one.key) is not None for item in first)]

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
        scores = self._by_file(scale, _case(name, budget))
        return Bootstrap().mean(resampling_units(*scores)) if scores else None

    def difference(self, scale: ItemScale, first: str, second: str, budget: str) -> Interval | None:
        """Paired difference, first less second, on items that both scored; None without any.

        A policy without cells at the budget, such as the full cache, stands with its whole cache.
        """
        known = self._pivot(scale.key).columns
        cases = [
            _case(name, budget if _case(name, budget) in known else WHOLE)
            for name in (first, second)
        ]
        scores = self._by_file(scale, *cases)
        return Bootstrap().difference(*map(resampling_units, scores)) if scores else None

    def bytes_share(self, name: str, budget: str) -> float:
        """Mean share of the full cache's bytes, over cells that were not refused."""
        return self._figure("bytes_share", name, budget)

    def dense_share(self, name: str, budget: str) -> float:
        """Mean share held by dense layers, over cells that were not refused."""
        return self._figure("dense_share", name, budget)

    def shares(self, name: str, budget: str) -> str:
        """Both shares, formatted for tables."""
        dense, share = self.dense_share(name, budget), f"{self.bytes_share(name, budget):.3f}"
        return f"{share}, {dense:.3f} in dense layers" if dense else share

    def budget_tokens(self, name: str, budget: str) -> int:
        """Mean budget in entries per kv head, over cells that were not refused."""
        return round(self._figure("budget_tokens", name, budget))

    def refused(self, name: str, budget: str) -> int:
        """Number of refused cells."""
        return int(self._figure("refused", name, budget))

    def _mean(self, scale: ItemScale, name: str, budget: str) -> str:
        interval, refused = self.interval(scale, name, budget), self.refused(name, budget)
        if interval is None:
            return "refused" if refused else ""
        note = f" ({refused} refused)" if refused else ""
        formatted = _format_interval(interval, scale.digits)
        return f"{formatted} ({self.shares(name, budget)}){note}"

    def _figure(self, column: str, name: str, budget: str) -> float:
        return self._figures.get((name, budget), {}).get(column) or 0.0

    def _by_file(self, scale: ItemScale, *cases: str) -> list[list[list[float]]]:
        """Scores of cases by file, on items that all of them have; empty without any."""
        pivot = self._pivot(scale.key)
        if not {*cases} <= {*pivot.columns}:
            return []
        scored = pivot.drop_nulls(cases)  # a score that is NaN is one
        edges = np.flatnonzero(np.diff(scored["source"])) + 1
        files = [
            [file.tolist() for file in np.split(scored[case].to_numpy(), edges)] for case in cases
        ]
        return files if len(scored) else []

    def _new_pivot(self, key: str) -> pl.DataFrame:
        """Scores of one scale: a column per policy and budget, a line per item of a file."""
        scores = [
            (source, number, _case(policy, budget), float(item[key]))
            for (policy, budget, source), items in self._items.items()
            for number, item in enumerate(items)
            if item.get(key) is not None
        ]
        if not scores:
            return pl.DataFrame()
        frame = pl.DataFrame(scores, ["source", "number", "case", "score"], orient="row")
        pivot = frame.pivot("case", index=["source", "number"], values="score")
        return pivot.sort("source", "number").with_columns(pl.col("source").rank("dense"))


def _case(policy: str, budget: str) -> str:
    return f"{policy} at {budget}"


def _cell_line(row: Row) -> Row:
    dense = row["dense_kv_bytes"] / row["full_kv_bytes"] if "dense_kv_bytes" in row else 0.0
    shares = {"bytes_share": row.get("bytes_share", 0.0), "dense_share": dense}
    counts = {"budget_tokens": row.get("budget_tokens", 0), "num_items": len(cell_items(row))}
    return row | {"source": source_label(row)} | shares | counts | cell_seconds(row)


def _num_files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"


def resampling_units(files: list[list[float]]) -> list[list[float]]:
    """Clusters of the bootstrap: files, or the items of a single file."""
    return files if len(files) > 1 else questions_as_clusters(files[0])


def _format_interval(interval: Interval, digits: int) -> str:
    mean, low, high = (round(x, digits) + 0.0 for x in (interval.mean, interval.low, interval.high))
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _markdown_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
