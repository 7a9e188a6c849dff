"""The commands that give the same results and figures again.

What lies in a folder of one's own stands as a word in capitals, which rows do not tell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from larder.bench.amounts import OWN, WHOLE
from larder.bench.rows import Results, Row
from larder.bench.study import CONTROLS, read_study, study_names

# What a task that is spelled so reads from.
FROM_CORPUS = re.compile(r"\b(bookings|mixed)\b|[\"']prose[\"']")
FROM_DATA = re.compile(
    r"\b(locomo|realtalk|planted|stacked|longbench|infinitebench)\b|[\"']files[\"']"
)


def commands(found: Results, paths: Sequence[Path], policies: Sequence[str] = ()) -> list[str]:
    """A line per study, then those that draw; of some policies where they were chosen."""
    named = " ".join(shlex.quote(str(path)) for path in paths)
    named += "".join(f" --policy {shlex.quote(policy)}" for policy in policies)
    lines = list(_measuring(found, paths))
    return [*lines, f"larder plot {named}", f"larder report {named}"]


def _measuring(found: Results, paths: Sequence[Path]) -> Iterator[str]:
    out = f" --out {shlex.quote(str(paths[0]))}" if len(paths) == 1 else ""
    known = study_names()
    for study in dict.fromkeys(row["study"] for row in found.cells):
        own = [row for row in found.cells if row["study"] == study]
        if study in known:
            words = ["--study", shlex.quote(study), *_changed(study, own)]
        else:
            words = [_spelled(own), "--name", shlex.quote(study)]
        yield f"larder bench {' '.join([*words, *_folders(own)])}{out}"


def _changed(study: str, rows: Sequence[Row]) -> Iterator[str]:
    """What its file says otherwise."""
    written, files = read_study(study), _files(rows)
    models = _all(rows, "model")
    if tuple(models) != written.models:
        yield from map(_model, models)
    if files != written.files:
        yield f"--files {files}"


def _folders(rows: Sequence[Row]) -> Iterator[str]:
    tasks = " ".join(_all(rows, "task"))
    if FROM_CORPUS.search(tasks):
        yield "--corpus FOLDER"
    if FROM_DATA.search(tasks):
        yield "--data FOLDER"


def _model(name: str) -> str:
    is_local = name.startswith(("/", ".", "~")) or ("/" in name and Path(name).exists())
    return f"--model {'MODEL_FOLDER' if is_local else shlex.quote(name)}"


def _files(rows: Sequence[Row]) -> int:
    seeds = [row["seed"] for row in rows]
    return 1 + max(seeds) - min(seeds)


def _spelled(rows: Sequence[Row]) -> str:
    """A study as options, as far as its cells tell: every task at every length."""
    seeds = [row["seed"] for row in rows]
    policies = _all([row for row in rows if row["policy"] not in CONTROLS], "policy")
    controls = _all([row for row in rows if row["policy"] in CONTROLS], "policy")
    budgets = [budget for budget in _all(rows, "budget") if budget not in (WHOLE, OWN)]
    words = [shlex.quote(task) for task in _all(rows, "task")]
    words += [
        f"--tokens {','.join(_all(rows, 'tokens'))}",
        f"--files {_files(rows)}",
    ]
    words += [f"--first-seed {min(seeds)}"] if min(seeds) else []
    words += map(_model, _all(rows, "model"))
    for option, values in (
        ("--measure", _all(rows, "measure")),
        ("--matched", _all(rows, "matched")),
        ("--budget", budgets),
        ("--policy", policies),
        ("--control", controls or ["none"]),
    ):
        words += [f"{option} {shlex.quote(value)}" for value in values]
    return " ".join(words)


def _all(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(str(row[name]) for row in rows))
