"""Index of all studies: the claim of each, the command that runs it, and its duration.

    python -m larder_bench.reports.study_index studies/README.md

writes the table into a Markdown file, between its two marks. Times are those of the committed rows
in `studies/results`. If a part has changed and its cells were not measured again, their rows are
removed, and `studies/results/pending.toml` counts the missing cells by study. Neither torch nor a
model is loaded here.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

from larder.core import InputError
from larder_bench.results.rows import read_results, rows_file
from larder_bench.studies.study import CHECKOUT, FOLDER, Study, read_study

RESULTS = CHECKOUT / FOLDER / "results"  # committed rows, `NAME.jsonl.zst` of the study NAME
PENDING = "pending.toml"  # in the same folder
BEGIN, END = "<!-- studies: begin -->", "<!-- studies: end -->"
# Spellings of tasks that read from a corpus or from data folders.
FROM_CORPUS = re.compile(r"\b(bookings|mixed)\b|[\"']prose[\"']")
FROM_DATA = re.compile(
    r"\b(locomo|realtalk|planted|stacked|longbench(_v2)?|infinitebench)\b|[\"']files[\"']"
)


def folder_options(tasks: Collection[str]) -> Iterator[str]:
    """Options that tasks need, with placeholders for the user's folders."""
    spellings = " ".join(tasks)
    if FROM_CORPUS.search(spellings):
        yield "--corpus FOLDER"
    if FROM_DATA.search(spellings):
        yield "--data FOLDER"


def study_command(study: Study) -> str:
    """Command that runs the study."""
    options = folder_options([task.spelling for task in study.tasks])
    return " ".join(["larder bench --study", study.name, *options])


def wall_seconds(path: Path) -> float:
    """Total seconds of the cells of a file, without loading models and texts.

    Raises:
        InputError: the file cannot be read.
    """
    return sum(row.get("seconds", 0.0) for row in read_results([path]).cells)


def pending_cells(measured: Path) -> dict[str, int]:
    """Number of cells to measure again, by study; studies without any are left out.

        Args:
    measured: folder of committed rows.
    """
    path = measured / PENDING
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def study_table(folder: Path, measured: Path) -> list[str]:
    """Markdown table with a line per study of a folder.

        Args:
    measured: folder of committed rows.
    """
    missing = pending_cells(measured)
    lines = ["| study | what it is to show | command | minutes |", "|---|---|---|---|"]
    for path in sorted(folder.glob("*.toml")):
        study, rows = read_study(str(path)), rows_file(measured, path.stem)
        minutes = f"{max(1, round(wall_seconds(rows) / 60))}" if rows.is_file() else ""
        minutes += f" ({missing[path.stem]} cells pending)" if path.stem in missing else ""
        lines.append(f"| {study.name} | {study.claim} | `{study_command(study)}` | {minutes} |")
    return lines


def replace_between(text: str, begin: str, end: str, lines: Collection[str]) -> str:
    """Text with other lines between two marks, which stay.

    Raises:
        InputError: the text has no marks.
    """
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise InputError(f"The text has no {begin} before an {end}: write them where a table goes.")
    return "\n".join([before + begin, *lines, end + after])


def replace_table(text: str, lines: Collection[str]) -> str:
    """Text with another table of studies between its marks.

    Raises:
        InputError: the text has no marks.
    """
    return replace_between(text, BEGIN, END, lines)


def main(path: Path) -> None:
    """Write the table of all studies into a file."""
    lines = study_table(CHECKOUT / FOLDER, RESULTS)
    path.write_text(replace_table(path.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
