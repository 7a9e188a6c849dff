"""All studies at a glance: what each claims, the command that runs it, how long that took.

    python -m larder_bench.reports.study_index studies/README.md

writes the table into a file in Markdown, between its two marks. Times are those of the committed
rows in `studies/results`. Where a part changed and its cells were not measured again, their rows
are removed, and `studies/results/pending.toml` counts the cells that are missing, by study. Neither
torch nor a model is loaded here.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

from larder.core.errors import InputError
from larder_bench.results.rows import read_results, rows_file
from larder_bench.studies.study import CHECKOUT, FOLDER, Study, read_study

RESULTS = CHECKOUT / FOLDER / "results"  # committed rows, `NAME.jsonl.zst` of the study NAME
PENDING = "pending.toml"  # beside the rows
BEGIN, END = "<!-- studies: begin -->", "<!-- studies: end -->"
# What a task that is spelled so reads from.
FROM_CORPUS = re.compile(r"\b(bookings|mixed)\b|[\"']prose[\"']")
FROM_DATA = re.compile(
    r"\b(locomo|realtalk|planted|stacked|longbench(_v2)?|infinitebench)\b|[\"']files[\"']"
)


def folder_options(tasks: Collection[str]) -> Iterator[str]:
    """The options that tasks need, with the folders of one's own in capitals."""
    told = " ".join(tasks)
    if FROM_CORPUS.search(told):
        yield "--corpus FOLDER"
    if FROM_DATA.search(told):
        yield "--data FOLDER"


def study_command(study: Study) -> str:
    """Command that runs the study."""
    options = folder_options([task.spelling for task in study.tasks])
    return " ".join(["larder bench --study", study.name, *options])


def wall_seconds(path: Path) -> float:
    """How long the cells of a file took together, reading models and texts left out.

    Raises:
        InputError: it cannot be read.
    """
    return sum(row.get("seconds", 0.0) for row in read_results([path]).cells)


def pending_cells(measured: Path) -> dict[str, int]:
    """Cells of each study that are to be measured again; studies without any are left out.

    Args:
        measured: the folder of committed rows.
    """
    path = measured / PENDING
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def study_table(folder: Path, measured: Path) -> list[str]:
    """A line per study of a folder.

    Args:
        measured: the folder of committed rows.
    """
    missing = pending_cells(measured)
    lines = ["| study | what it is to show | command | minutes |", "|---|---|---|---|"]
    for path in sorted(folder.glob("*.toml")):
        study, rows = read_study(str(path)), rows_file(measured, path.stem)
        took = f"{max(1, round(wall_seconds(rows) / 60))}" if rows.is_file() else ""
        took += f" ({missing[path.stem]} cells pending)" if path.stem in missing else ""
        lines.append(f"| {study.name} | {study.claim} | `{study_command(study)}` | {took} |")
    return lines


def replace_table(text: str, lines: Collection[str]) -> str:
    """The text with other lines between its marks.

    Raises:
        InputError: it has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise InputError(f"The text has no {BEGIN} before an {END}: write them where a table goes.")
    return "\n".join([before + BEGIN, *lines, END + behind])


def main(path: Path) -> None:
    """Write the table of all studies into a file."""
    lines = study_table(CHECKOUT / FOLDER, RESULTS)
    path.write_text(replace_table(path.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
