"""JSON documents of `larder bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from larder.cli.errors import SCHEMA
from larder_bench.execution.runner import StudyRunner
from larder_bench.reports.paper_comparison import comparison_document
from larder_bench.results.rows import Row
from larder_bench.results.tables import SCALES, ScoreTable

CONDITIONS = {"question": "after", "wording": "seed"}  # and their usual values
GROUP_FIELDS = ("model", "device", "dtype", "task", "tokens", "measure", "matched", *CONDITIONS)
COST_FIELDS = ("budget_tokens", "kv_bytes", "active_kv_bytes", "peak_kv_bytes", "tokens_per_second")


def comparable_groups(rows: Sequence[Row]) -> Iterator[tuple[str, Row, list[Row]]]:
    """Groups of comparable cells: title, common fields and cells."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in GROUP_FIELDS), []).append(row)
    kinds = {key[1:3] for key in groups}
    for key, group in groups.items():
        common: Row = dict(zip(GROUP_FIELDS, key, strict=True))
        title = "{model}: {task}, {tokens} tokens, {measure}, equal {matched}".format(**common)
        title += " ({device}, {dtype})".format(**common) if len(kinds) > 1 else ""
        if common["question"] != CONDITIONS["question"]:
            title += ", question inside the compressed context"
        if common["wording"] != CONDITIONS["wording"]:
            title += ", {wording} wording".format(**common)
        yield title, common, group


def study_document(runner: StudyRunner, rows: Sequence[Row]) -> dict[str, Any]:
    """Document of a study with the results measured so far."""
    paper = runner.paper()
    comparison = {"paper": comparison_document(paper, rows)} if paper is not None else {}
    return {
        "schema": SCHEMA,
        "study": runner.study.name,
        "claim": runner.study.claim,
        "out": str(runner.out),
        "cells": len(rows),
        "other_cells": runner.num_other_cells(),
        "refused": sum("refused" in row for row in rows),
        "groups": [
            common | {"results": _results(cells)} for _, common, cells in comparable_groups(rows)
        ],
    } | comparison


def _results(rows: Sequence[Row]) -> list[Row]:
    """Results, one per policy and budget."""
    table, results = ScoreTable(rows), list[Row]()
    for key in dict.fromkeys((row["policy"], row["budget"]) for row in rows):
        group_rows = [row for row in rows if (row["policy"], row["budget"]) == key]
        scales = {
            scale.key: table.interval(scale, *key) for scale in table.scales_with_data(SCALES)
        }
        results.append(
            {
                "policy": key[0],
                "spelling": group_rows[0]["spelling"],
                "budget": key[1],
                "bytes_share": round(table.bytes_share(*key), 5),
                "dense_bytes_share": round(table.dense_share(*key), 5),
                "files": len(group_rows),
                "refused": [row["refused"] for row in group_rows if "refused" in row],
            }
            | {name: asdict(one) for name, one in scales.items() if one is not None}
            | _costs(group_rows)
            | {name: round(each, 6) for name, each in table.seconds(*key).items()}
        )
    return results


def _costs(rows: Sequence[Row]) -> Row:
    """Mean costs of the cells that were not refused."""
    measured = [row for row in rows if "refused" not in row]
    names = [name for name in COST_FIELDS if measured and all(name in row for row in measured)]
    return {name: round(sum(row[name] for row in measured) / len(measured), 4) for name in names}
