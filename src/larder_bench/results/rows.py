"""Rows of results files: lines of JSON, one per measured cell, and one per environment.

The files also hold exhibits, rows of other kinds that only figures use (`EXHIBITS`), and the values
reported by a paper (`larder_bench.results.papers`).

Files are append-only. An incomplete last line, left by an interrupted run, is not a row; the next
writer removes it. Neither torch nor a model is loaded here, so that figures need neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from larder.core import InputError

Row = dict[str, Any]
SUFFIX, COMPRESSED = (
    ".jsonl",
    ".zst",
)  # of results files; the second follows the first if compressed
COMPRESSION_LEVEL = 19
SCHEMA = 1
ENVIRONMENT, CELL, PAPER = "environment", "cell", "paper"
# Fields of a row about what was read and how, before its data.
HEAD_KEYS = ("study", "model", "task", "tokens", "seed", "policy", "spelling", "budget")
# Fields that were added later, in rows of studies.
CONDITION_KEYS = ("matched", "measure", "device", "dtype", "question", "wording")
# Kinds of exhibits, and the fields beside those above that identify one.
#   budgets     `lengths`: entries that each kv head of each layer keeps, of one `episode`
#   clusters    `segments` on a map, and their `episodes`
#   (`larder_bench.studies.exhibits`)
#   prompt      `items` as a cell's, each with its `similarity`, under a prompt taken around that
#               `percentile` of the utterances' similarity to the question; None is the question
#   recall      `recall`: share of the true k nearest that are found among `fetched_tokens`, by k;
#               `layer` and `step` may be None: the mean over all
#   eviction    what an eviction policy saves on a trace (`task`; its number of events: `tokens`)
#               on a tier whose budget is that share of the bytes that the trace needs:
#               `hit_tokens` of `known_tokens`, `hit_seconds` of `known_seconds`, and its cost
#   breakdown   `parts`: seconds (`p50`, `p95`) of the parts of a `step`, in order
EXHIBITS: dict[str, tuple[str, ...]] = {
    "budgets": ("episode",),
    "clusters": (),
    "prompt": ("percentile",),
    "recall": ("fetched_tokens", "layer", "step"),
    "eviction": (),
    "breakdown": ("step",),
}
SHARED_KEY = "shared_with"  # of rows that were not measured themselves
TEXT_DIGEST_KEY = "text_digest"  # of the conversation that was read, questions included
EXHIBITS_KEY = "exhibits"  # exhibits of a row that is not written yet
# Fields that may differ between two runs of a cell, besides names that end in _seconds.
TIMING_KEYS = frozenset(
    {
        "seconds",
        "latency",
        "parts",
        "date",
        SHARED_KEY,
        "tokens_per_second",
        "policy_share",
        "process_peak_bytes",  # as the operating system reports it
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
    question: str = "after"
    wording: str = "seed"


# Values of fields that early files lack.
_KEY_DEFAULTS = CellKey._field_defaults
_REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    ENVIRONMENT: ("id",),
    CELL: tuple(name for name in CellKey._fields if name not in _KEY_DEFAULTS),
    PAPER: ("study", "cite", "setup", "differs", "values"),
    **{kind: (*HEAD_KEYS, *identifying) for kind, identifying in EXHIBITS.items()},
}


@dataclass(frozen=True)
class Results:
    """Contents of results files.

    Args:
        cells: the last row of each key, in the order in which the keys first appear.
        environments: rows by id.
        exhibits: rows of other kinds, the last of each key.
        papers: values reported by papers, the last row of each study.
    """

    cells: tuple[Row, ...]
    environments: dict[str, Row]
    exhibits: tuple[Row, ...] = ()
    papers: tuple[Row, ...] = ()

    @property
    def measured(self) -> tuple[Row, ...]:
        """Cells that were not refused."""
        return tuple(row for row in self.cells if "refused" not in row)

    def exhibits_of(self, kind: str) -> tuple[Row, ...]:
        """Exhibits of one kind."""
        return tuple(row for row in self.exhibits if row["row"] == kind)


def cell_key(row: Row) -> CellKey:
    """Unique key of a cell's row."""
    return CellKey(
        **{name: row[name] for name in CellKey._fields if name in row or name not in _KEY_DEFAULTS}
    )


def read_results(paths: Iterable[Path]) -> Results:
    """All cells, environments and exhibits of results files.

    Args:
        paths: files, or folders of results files.

    Raises:
        InputError: a file cannot be read, or holds something that is not a row.
    """
    rows: list[Row] = []
    for path in result_files(paths):
        file_rows = read_rows(path)
        for row in file_rows:
            _check(row, path)
        rows += file_rows
    cells = {cell_key(row): {**_KEY_DEFAULTS, **row} for row in rows if row["row"] == CELL}
    exhibits = {exhibit_key(row): row for row in rows if row["row"] in EXHIBITS}
    environments = {row["id"]: row for row in rows if row["row"] == ENVIRONMENT}
    papers = {row["study"]: row for row in rows if row["row"] == PAPER}
    return Results(
        cells=tuple(cells.values()),
        environments=environments,
        exhibits=tuple(exhibits.values()),
        papers=tuple(papers.values()),
    )


def result_files(paths: Iterable[Path]) -> list[Path]:
    """Results files among the paths, folders replaced by their files in order of name.

    Raises:
        InputError: a folder holds none.
    """
    result: list[Path] = []
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted([*path.glob(f"*{SUFFIX}"), *path.glob(f"*{SUFFIX}{COMPRESSED}")])
        if not files:
            raise InputError(f"{path} holds no .jsonl file: name a folder with results, or files.")
        result += files
    return result


def rows_file(folder: Path, study: str) -> Path:
    """Results file of a study in a folder; the compressed one if it exists."""
    path = folder / f"{study}{SUFFIX}"
    packed = path.with_name(path.name + COMPRESSED)
    return packed if packed.is_file() else path


def read_rows(path: Path) -> list[Row]:
    """All lines of a file of JSON lines, decompressed if its name ends in `.zst`.

    An incomplete last line is left out.

    Raises:
        InputError: the file cannot be read, or a line is not JSON.
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
    """Append lines to a file in one write, creating it if missing; an incomplete last line is
    removed first.

    Raises:
        InputError: the file cannot be written.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == COMPRESSED:  # every append is a frame of its own
            compressor = zstandard.ZstdCompressor(COMPRESSION_LEVEL)
            if path.exists() and not _is_complete(path):
                path.write_bytes(compressor.compress(_complete_lines(path)))
            text = compressor.compress(text)
        elif path.exists():
            _truncate_partial_line(path)
        with path.open("ab") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error}): name another file.") from error


def split_exhibits(row: Row) -> list[Row]:
    """Exhibits of a row that was just measured, followed by the row itself; exhibits repeat the
    row's head.
    """
    head = {name: row[name] for name in (*HEAD_KEYS, *CONDITION_KEYS, "environment") if name in row}
    exhibits = [
        {"schema": SCHEMA, "row": one["row"]} | head | one for one in row.get(EXHIBITS_KEY, ())
    ]
    return [*exhibits, {name: value for name, value in row.items() if name != EXHIBITS_KEY}]


def without_timings(row: Row) -> Row:
    """Row without the fields that may differ between two runs."""
    return {name: value for name, value in row.items() if not _is_timing(name)}


def exhibit_key(row: Row) -> str:
    """Unique key of an exhibit."""
    required = (row[name] for name in _REQUIRED_KEYS[row["row"]])
    return json.dumps([row["row"], *required, *(row.get(name) for name in CONDITION_KEYS)])


def _check(row: Any, path: Path) -> None:
    """Check that a line is a row with all fields of its key.

    Raises:
        InputError: it is not a row, or lacks a field.
    """
    has_schema = isinstance(row, dict) and row.get("schema") == SCHEMA
    kind = row.get("row") if has_schema else None
    if kind not in _REQUIRED_KEYS:
        raise InputError(
            f"{path} has a line that is not a row of schema {SCHEMA}: {json.dumps(row)[:60]}... "
            "Name files that larder bench has written."
        )
    if missing := [name for name in _REQUIRED_KEYS[kind] if name not in row]:
        raise InputError(
            f"{path} has a row {kind!r} without {', '.join(missing)}: name files that larder bench "
            "has written."
        )


def _is_timing(name: str) -> bool:
    return name in TIMING_KEYS or name.endswith("_seconds")


def _complete_lines(path: Path) -> bytes:
    """Decompressed content of a file up to its last line break."""
    data = path.read_bytes()
    if path.suffix == COMPRESSED:
        data, _ = _decompress(data)
    return data[: data.rfind(b"\n") + 1]


def _is_complete(path: Path) -> bool:
    return _decompress(path.read_bytes())[1]


def _decompress(data: bytes) -> tuple[bytes, bool]:
    """Content of zstd frames, and whether the last frame is complete."""
    lines, is_complete = bytearray(), True
    while data and is_complete:
        frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            lines += frame.decompress(data)
        except zstandard.ZstdError:
            return bytes(lines), False
        data, is_complete = frame.unused_data, frame.eof
    return bytes(lines), is_complete


def _truncate_partial_line(path: Path) -> None:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END) or file.seek(-1, os.SEEK_END) < 0 or file.read() == b"\n":
            return
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
