"""The commands that give the same results and figures again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from larder.bench.amounts import OWN, WHOLE
from larder.bench.rows import Results, Row
from larder.bench.study import CONTROLS, study_names


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
            yield f"larder bench --study {shlex.quote(study)}{out}"
        else:
            yield f"larder bench {_spelled(own)} --name {shlex.quote(study)}{out}"


def _spelled(rows: Sequence[Row]) -> str:
    """A study as options, as far as its cells tell: every task at every length."""
    seeds = [row["seed"] for row in rows]
    policies = _all([row for row in rows if row["policy"] not in CONTROLS], "policy")
    controls = _all([row for row in rows if row["policy"] in CONTROLS], "policy")
    budgets = [budget for budget in _all(rows, "budget") if budget not in (WHOLE, OWN)]
    words = [shlex.quote(task) for task in _all(rows, "task")]
    words += [
        f"--tokens {','.join(_all(rows, 'tokens'))}",
        f"--files {1 + max(seeds) - min(seeds)}",
    ]
    words += [f"--first-seed {min(seeds)}"] if min(seeds) else []
    for option, values in (
        ("--model", _all(rows, "model")),
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
