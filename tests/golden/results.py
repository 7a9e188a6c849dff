"""Goldens of results: the fields of committed rows, and the rows of a small run."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from golden.access import run, study_rows
from golden.comparison import MASK, Golden, masked
from golden.surface import ROOT

STUDIES = ROOT / "studies" / "results"
MACHINE = (
    "environment",
    "id",
    "commit",
    "date",
    "platform",
    "cpu",
    "processor",
    "kernels",
    "threads",
    "larder",
    "seconds",
)
MACHINE += ("python", "torch", "transformers", "latency", "first_token_p50", "first_token_p95")
MACHINE += ("token_p50", "token_p95")
SMALL = ("--files", "1", "--budget", "1/4", "--control", "full", "--control", "random")
NEEDLES = ("needles", "--tokens", "300", "--policy", "keydiff", *SMALL)
LIFELOG = ("lifelog", "--tokens", "400", "--policy", "snapkv_blockwise", *SMALL)


def fields() -> dict[str, Any]:
    """Fields that all rows have, and fields that some have, by study and kind of row."""
    return {
        path.name.partition(".")[0]: _fields(study_rows(path))
        for path in sorted(STUDIES.glob("*.jsonl.zst"))
    }


def rows() -> dict[str, Any]:
    """Document and rows of `larder bench`, without times and the machine."""
    return _ran((*NEEDLES, "--matched", "tokens"))


def more_rows() -> dict[str, Any]:
    """Documents and rows of other tasks and measures, matched by bytes as well."""
    return {
        "lifelog": _ran(LIFELOG),
        "generated": _ran((*LIFELOG, "--measure", "generated", "--matched", "tokens")),
        "fidelity": _ran((*NEEDLES, "--measure", "fidelity", "--matched", "tokens")),
    }


def figures() -> Any:
    """Documents of `larder plot` and `larder bench --estimate` for a run."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        run("bench", *LIFELOG, "--out", out)
        words = ("plot", out, "--out", Path(folder) / "figures", "--format", "svg", "--json")
        drawn = json.loads(run(*words).stdout.replace(folder, MASK))
        result = json.loads(run("bench", *LIFELOG, "--out", out, "--estimate", "--json").stdout)
        return masked({"plot": drawn, "estimate": result}, ("seconds", "caption", "title"))


def _ran(words: tuple[str, ...]) -> Any:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        result = run("bench", *words, "--out", out, "--json")
        assert result.code == 0, result
        page = Path(folder) / "page.html"
        report = run("report", out, "--out", page, "--json")
        assert page.stat().st_size > 0
        found = {
            "document": json.loads(result.stdout),
            "rows": study_rows(out),
            "report": json.loads(report.stdout),
        }
        found = json.loads(json.dumps(found).replace(folder, MASK))
        return masked(found, MACHINE)


def _fields(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    names: dict[str, list[set[str]]] = {}
    for row in rows:
        names.setdefault(" ".join(_kind(row)), []).append(set(row))
    return {
        kind: {
            "all": sorted(set.intersection(*arguments)),
            "some": sorted(set.union(*arguments) - set.intersection(*arguments)),
        }
        for kind, arguments in sorted(names.items())
    }


def _kind(row: dict[str, Any]) -> tuple[str, ...]:
    measure = (row["measure"],) if "measure" in row else ()
    return (row["row"], *measure, *(["refused"] if "refused" in row else []))


SLOW: dict[str, Golden] = {"bench_more": more_rows, "plot": figures}
GOLDENS: dict[str, Golden] = {"study_fields": fields, "bench": rows}
