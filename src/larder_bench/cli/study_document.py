"""JSON documents of `larder bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from larder.cli.errors import SCHEMA
from larder_bench.execution.runner import StudyRunner
from larder_bench.reports.paper_comparison import comparison_document
from larder_bench.results.rows import Row
from larder_bench.results.tables import SCALES, CellScores, ScoreTable, cell_scores

GROUP_FIELDS = ("model", "device", "dtype", "task", "tokens", "measure", "matched")
COST_FIELDS = ("budget_tokens", "kv_bytes", "active_kv_bytes", "peak_kv_bytes", "tokens_per_second")


def comparable_groups(rows: Sequence[Row]) -> Iterator[tuple[str, Row, list[CellScores]]]:
    """Cells that a table can compare: a title, what they have in common, and them."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in GROUP_FIELDS), []).append(row)
    places = {key[1:3] for key in found}
    for key, mine in found.items():
        common: Row = dict(zip(GROUP_FIELDS, key, strict=True))
        title = "{model}: {task}, {tokens} tokens, {measure}, equal {matched}".format(**common)
        title += " ({device}, {dtype})".format(**common) if len(places) > 1 else ""
        yield title, common, [cell_scores(row) for row in mine]


def study_document(running: StudyRunner, rows: Sequence[Row]) -> dict[str, Any]:
    """A study as far as it has come."""
    paper = running.paper()
    told = {"paper": comparison_document(paper, rows)} if paper is not None else {}
    return {
        "schema": SCHEMA,
        "study": running.study.name,
        "claim": running.study.claim,
        "out": str(running.out),
        "cells": len(rows),
        "other_cells": running.others(),
        "refused": sum("refused" in row for row in rows),
        "groups": [
            common | {"results": _results(entries, [r for r in rows if _belongs_to(r, common)])}
            for _, common, entries in comparable_groups(rows)
        ],
    } | told


def _belongs_to(row: Row, common: Row) -> bool:
    return all(row[name] == value for name, value in common.items())


def _results(entries: Sequence[CellScores], rows: Sequence[Row]) -> list[Row]:
    """One per policy and budget."""
    table, told = ScoreTable(entries), list[Row]()
    for place in dict.fromkeys((one.policy, one.budget) for one in entries):
        mine = [row for row in rows if (row["policy"], row["budget"]) == place]
        scales = {scale.key: table.interval(scale, *place) for scale in table.held(SCALES)}
        told.append(
            {
                "policy": place[0],
                "spelling": mine[0]["spelling"],
                "budget": place[1],
                "bytes_share": round(table.bytes_share(*place), 5),
                "dense_bytes_share": round(table.dense_share(*place), 5),
                "files": len(mine),
                "refused": [row["refused"] for row in mine if "refused" in row],
            }
            | {name: asdict(one) for name, one in scales.items() if one is not None}
            | _costs(mine)
            | {name: round(each, 6) for name, each in table.seconds(*place).items()}
        )
    return told


def _costs(rows: Sequence[Row]) -> Row:
    """Means of what was really held and spent."""
    held = [row for row in rows if "refused" not in row]
    named = [name for name in COST_FIELDS if held and all(name in row for row in held)]
    return {name: round(sum(row[name] for row in held) / len(held), 4) for name in named}
