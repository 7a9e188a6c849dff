"""Rows of results files: lines of JSON, one per measured cell, and one per environment.

Beside them stand exhibits, rows of other kinds that only figures are drawn from (`EXHIBITS`), and
what a paper reports of the same (`larder_bench.results.papers`).

A file is only ever added to. A line that a stop cut off is no row, and the next writer removes it.
Neither torch nor a model is loaded here, so that figures are drawn without them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from larder.core.errors import InputError

Row = dict[str, Any]
SUFFIX, COMPRESSED = ".jsonl", ".zst"  # of result files; the second, behind the first, if packed
COMPRESSION_LEVEL = 19
SCHEMA = 1
ENVIRONMENT, CELL, PAPER = "environment", "cell", "paper"
# What a row tells of what was read and how; its data follows.
HEAD_KEYS = ("study", "model", "task", "tokens", "seed", "policy", "spelling", "budget")
# What it tells since it was first written, where it is a study's.
CONDITION_KEYS = ("matched", "measure", "device", "dtype")
# Rows that a figure of their own is drawn from, and what tells two of a kind apart beside those.
#   budgets     `lengths`: entries that each kv head of each layer keeps, of one `episode`
#   clusters    `segments` on a map, and the `episodes` that they form
#   (`larder_bench.studies.exhibits`)
#   prompt      `items` as a cell's, each with its `similarity`, under a prompt taken around that
#               `percentile` of utterances' nearness to the question; None is the question itself
#   recall      `recall`: share of the true k nearest that are found among `fetched_tokens`, by k;
#               `layer` and `step` may be None: the mean over all
#   eviction    what a rule of eviction saves of a trace (`task`, of so many events: `tokens`) on
#               a tier whose budget is that share of the bytes that the trace needs: `hit_tokens` of
#               `known_tokens`, `hit_seconds` of `known_seconds`, and what it takes
#   breakdown   `parts`: seconds (`p50`, `p95`) of what a `step` consists of, in order
EXHIBITS: dict[str, tuple[str, ...]] = {
    "budgets": ("episode",),
    "clusters": (),
    "prompt": ("percentile",),
    "recall": ("fetched_tokens", "layer", "step"),
    "eviction": (),
    "breakdown": ("step",),
}
TEXT_DIGEST_KEY = "text_digest"  # of the conversation that was read, questions included
EXHIBITS_KEY = "exhibits"  # where a row that was just measured has its exhibits
# What may differ between two runs of the same cell, besides names that end in _seconds.
TIMING_KEYS = frozenset(
    {
        "seconds",
        "latency",
        "parts",
        "date",
        "shared_with",
        "tokens_per_second",
        "policy_share",
        "process_peak_bytes",  # the system's own account
        "working_peak_bytes",
    }
)


class CellKey(NamedTuple):
    """Unique key of a cell in a study."""

    study: str
    model_fingerprint: str
    task: str
    tokens: int
    seed: int
    spelling: str
    budget: str
    matched: str
    measure: str
    device: str = "cpu"
    dtype: str = "float32"


# What rows told nothing of at first, and what was usual then.
_KEY_DEFAULTS = CellKey._field_defaults
_REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    ENVIRONMENT: ("id",),
    CELL: tuple(name for name in CellKey._fields if name not in _KEY_DEFAULTS),
    PAPER: ("study", "cite", "setup", "differs", "values"),
    **{kind: (*HEAD_KEYS, *own) for kind, own in EXHIBITS.items()},
}


@dataclass(frozen=True)
class Results:
    """Contents of results files.

    Args:
        cells: the last row of each key, in the order in which the keys came first.
        environments: by their ids.
        exhibits: rows of other kinds, the last of those that show the same.
        papers: what a paper reports of the same, the last row of each study.
    """

    cells: tuple[Row, ...]
    environments: dict[str, Row]
    exhibits: tuple[Row, ...] = ()
    papers: tuple[Row, ...] = ()

    @property
    def measured(self) -> tuple[Row, ...]:
        """The cells that were not refused."""
        return tuple(row for row in self.cells if "refused" not in row)

    def shown(self, kind: str) -> tuple[Row, ...]:
        """The exhibits of one kind."""
        return tuple(row for row in self.exhibits if row["row"] == kind)


def cell_key(row: Row) -> CellKey:
    """By which a cell is found again."""
    return CellKey(
        **{name: row[name] for name in CellKey._fields if name in row or name not in _KEY_DEFAULTS}
    )


def read_results(paths: Iterable[Path]) -> Results:
    """All cells, environments and exhibits of result files.

    Args:
        paths: files, or folders for all files that lie in them.

    Raises:
        InputError: a file cannot be read, or holds what is no row.
    """
    rows: list[Row] = []
    for path in result_files(paths):
        mine = read_rows(path)
        for row in mine:
            _check(row, path)
        rows += mine
    cells = {cell_key(row): {**_KEY_DEFAULTS, **row} for row in rows if row["row"] == CELL}
    exhibits = {exhibit_key(row): row for row in rows if row["row"] in EXHIBITS}
    environments = {row["id"]: row for row in rows if row["row"] == ENVIRONMENT}
    papers = {row["study"]: row for row in rows if row["row"] == PAPER}
    shown = tuple(exhibits.values()), tuple(papers.values())
    return Results(tuple(cells.values()), environments, *shown)


def result_files(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and those of folders by name.

    Raises:
        InputError: a folder holds none.
    """
    found: list[Path] = []
    for path in paths:
        own = [path]
        if path.is_dir():
            own = sorted([*path.glob(f"*{SUFFIX}"), *path.glob(f"*{SUFFIX}{COMPRESSED}")])
        if not own:
            raise InputError(f"{path} holds no .jsonl file: name a folder with results, or files.")
        found += own
    return found


def rows_file(folder: Path, study: str) -> Path:
    """The result file of a study in a folder: the packed one where there is one."""
    path = folder / f"{study}{SUFFIX}"
    packed = path.with_name(path.name + COMPRESSED)
    return packed if packed.is_file() else path


def read_rows(path: Path) -> list[Row]:
    """All lines of a file of JSON lines, packed with zstd if its name ends in `.zst`.

    A line that a stop cut off is left out.

    Raises:
        InputError: it cannot be read, or a line is not JSON.
    """
    try:
        lines = _complete_lines(path).decode().split("\n")
        return [json.loads(line) for line in lines if line]
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON lines ({error}): name another.") from error


def existing_rows(path: Path) -> list[Row]:
    """Rows of a file; empty if there is no file yet."""
    return read_rows(path) if path.exists() else []


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add lines to a file in one write, made where there is none; half a line before is removed.

    Raises:
        InputError: it cannot be written.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == COMPRESSED:  # every append is a frame of its own
            packer = zstandard.ZstdCompressor(COMPRESSION_LEVEL)
            if path.exists() and not _is_complete(path):
                path.write_bytes(packer.compress(_complete_lines(path)))
            text = packer.compress(text)
        elif path.exists():
            _truncate_partial_line(path)
        with path.open("ab") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error}): name another file.") from error


def split_exhibits(row: Row) -> list[Row]:
    """A row that was just measured, behind the exhibits that it came with, headed as it is."""
    head = {name: row[name] for name in (*HEAD_KEYS, *CONDITION_KEYS, "environment") if name in row}
    shown = [
        {"schema": SCHEMA, "row": one["row"]} | head | one for one in row.get(EXHIBITS_KEY, ())
    ]
    return [*shown, {name: value for name, value in row.items() if name != EXHIBITS_KEY}]


def without_timings(row: Row) -> Row:
    """The row without what differs between two runs."""
    return {name: value for name, value in row.items() if not _is_timing(name)}


def exhibit_key(row: Row) -> str:
    """Unique key of an exhibit."""
    own = (row[name] for name in _REQUIRED_KEYS[row["row"]])
    return json.dumps([row["row"], *own, *(row.get(name) for name in CONDITION_KEYS)])


def _check(row: Any, path: Path) -> None:
    """Raises: InputError: it is no row, or one without what it is known by."""
    named = isinstance(row, dict) and row.get("schema") == SCHEMA
    kind = row.get("row") if named else None
    if kind not in _REQUIRED_KEYS:
        raise InputError(
            f"{path} has a line that is no row of schema {SCHEMA}: {json.dumps(row)[:60]}... Name "
            "files that larder bench has written."
        )
    if missing := [name for name in _REQUIRED_KEYS[kind] if name not in row]:
        raise InputError(
            f"{path} has a row {kind!r} without {', '.join(missing)}: name files that larder bench "
            "has written."
        )


def _is_timing(name: str) -> bool:
    return name in TIMING_KEYS or name.endswith("_seconds")


def _complete_lines(path: Path) -> bytes:
    """The content of a file up to its last line break, unpacked."""
    data = path.read_bytes()
    if path.suffix == COMPRESSED:
        data, _ = _unpack(data)
    return data[: data.rfind(b"\n") + 1]


def _is_complete(path: Path) -> bool:
    return _unpack(path.read_bytes())[1]


def _unpack(data: bytes) -> tuple[bytes, bool]:
    """The content of zstd frames, and whether the last of them is whole."""
    lines, is_whole = bytearray(), True
    while data and is_whole:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            lines += frame.decompress(data)
        except zstandard.ZstdError:
            return bytes(lines), False
        data, is_whole = frame.unused_data, frame.eof
    return bytes(lines), is_whole


def _truncate_partial_line(path: Path) -> None:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END) or file.seek(-1, os.SEEK_END) < 0 or file.read() == b"\n":
            return
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
