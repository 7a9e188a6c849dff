"""What a benchmark leaves behind: lines of JSON, one per measured cell, and one per environment.

A file is only ever added to. A line that a stop cut off is no row, and the next writer removes it.
Neither torch nor a model is loaded here, so that figures are drawn without them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from larder.core.errors import InputError

Row = dict[str, Any]
SCHEMA = 1
ENVIRONMENT, CELL = "environment", "cell"
ID_LENGTH = 12
# What may differ between two runs of the same cell, besides names that end in _seconds.
TIMED = frozenset({"seconds", "latency", "date", "tokens_per_second"})


class Key(NamedTuple):
    """What no two cells of a study have in common."""

    study: str
    model_fingerprint: str
    task: str
    tokens: int
    seed: int
    spelling: str
    budget: str
    matched: str
    measure: str


@dataclass(frozen=True)
class Results:
    """What result files hold.

    Args:
        cells: the last row of each key, in the order in which the keys came first.
        environments: by their ids.
    """

    cells: tuple[Row, ...]
    environments: dict[str, Row]

    @property
    def measured(self) -> tuple[Row, ...]:
        """The cells that were not refused."""
        return tuple(row for row in self.cells if "refused" not in row)


def key(row: Row) -> Key:
    """By which a cell is found again."""
    return Key(**{name: row[name] for name in Key._fields})


def results(paths: Iterable[Path]) -> Results:
    """All cells and environments of result files.

    Raises:
        InputError: a file cannot be read, or holds what is no row.
    """
    rows = [row for path in paths for row in rows_of(path)]
    for row in rows:
        if row.get("schema") != SCHEMA or row.get("row") not in (ENVIRONMENT, CELL):
            raise InputError(
                f"A line is no row of schema {SCHEMA}: {json.dumps(row)[:80]}... Name files that "
                "larder bench has written."
            )
    cells = {key(row): row for row in rows if row["row"] == CELL}
    environments = {row["id"]: row for row in rows if row["row"] == ENVIRONMENT}
    return Results(tuple(cells.values()), environments)


def rows_of(path: Path) -> list[Row]:
    """All lines of a file of JSON lines; a line cut off by a stop is left out.

    Raises:
        InputError: it cannot be read, or a line is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines if line]
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON lines ({error}): name another.") from error


def known_rows(path: Path) -> list[Row]:
    """The same; none if there is no file yet."""
    return rows_of(path) if path.exists() else []


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add lines to a file in one write, made where there is none; half a line before is removed.

    Raises:
        InputError: it cannot be written.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _cut_half_line(path)
        with path.open("ab") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error}): name another file.") from error


def untimed(row: Row) -> Row:
    """The row without what differs between two runs."""
    return {name: value for name, value in row.items() if not _is_timed(name)}


def environment(threads: int) -> Row:
    """What figures depend on beside what a cell tells. Equal surroundings have equal ids: the date
    does not count.

    Args:
        threads: that torch computes with.
    """
    told: Row = {
        "larder": _version("larder"),
        "commit": commit_of_this(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": threads,
    }
    digest = hashlib.blake2b(json.dumps(told).encode(), digest_size=ID_LENGTH // 2).hexdigest()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"schema": SCHEMA, "row": ENVIRONMENT, "id": digest}
    return {**head, **told, "date": date}


def commit_of_this() -> str:
    """The commit of the checkout that this file belongs to; empty where there is none."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()


def _is_timed(name: str) -> bool:
    return name in TIMED or name.endswith("_seconds")


def _cut_half_line(path: Path) -> None:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END) or file.seek(-1, os.SEEK_END) < 0 or file.read() == b"\n":
            return
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()
