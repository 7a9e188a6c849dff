"""Results in the form of kvpress' leaderboard: a folder per policy, budget and task.

    python -m larder_bench.reports.kvpress_leaderboard results/bench.jsonl --out leaderboard

A folder is what `evaluate.py` of kvpress 0.5.4 writes for one run: `config.yaml` with its fields,
`metrics.json` with the score of each kind of question in percent, and `predictions.csv`. Its name
has the data set, the length, the model, the method and the compression ratio. Exported are answers
that were generated and scored as their data set scores.

Two things say more than kvpress' own: `compression_ratio` is the share of bytes that a question did
not attend to, as measured, not the one that was asked for; and names begin with `larder_`, since
neither texts nor methods are kvpress'. Neither torch nor a model is loaded here.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from larder.core import InputError
from larder_bench.results.rows import CellKey, Results, Row, cell_key, read_results

GENERATED = "generated"  # measure whose items are answers
PREFIX = "larder_"
# Fields of kvpress' configuration that no row of ours has, with their defaults there.
ABSENT: Mapping[str, object] = {
    "key_channel_compression_ratio": None,
    "fraction": 1.0,
    "max_new_tokens": None,
    "max_context_length": None,
    "needle_depth": None,
    "compression_interval": None,
    "target_size": None,
    "hidden_states_buffer_size": None,
    "log_level": "INFO",
    "fp8": False,
}
PREDICTION_FIELDS: tuple[str, ...] = (
    "task",
    "seed",
    "question",
    "predicted_answer",
    "score",
    "compression_ratio",
)


@dataclass(frozen=True)
class LeaderboardRun:
    """Cells that differ in their texts alone, as one run of kvpress' evaluation.

    Args:
        cells: rows of one policy, budget, task and length, at least one.
    """

    cells: tuple[Row, ...]

    @property
    def compression_ratio(self) -> float:
        """Measured share of the bytes that a question did not attend to."""
        return round(max(0.0, 1.0 - fmean(row["bytes_share"] for row in self.cells)), 4)

    @property
    def press_name(self) -> str:
        """Name of the policy."""
        return PREFIX + self.cells[0]["policy"].replace(":", "_")

    @property
    def folder_name(self) -> str:
        """Name of the folder, as kvpress composes it."""
        row = self.cells[0]
        parts = [
            PREFIX + row["kind"],
            str(row["tokens"]),
            str(row["model"]).replace("/", "--"),
            self.press_name,
            f"{self.compression_ratio:.2f}",
            *(["query_aware"] if self._is_query_aware else []),
        ]
        return "__".join(parts)

    def config(self, out: Path) -> dict[str, Any]:
        """Configuration of the run.

        Args:
            out: folder of all runs.
        """
        row = self.cells[0]
        return {
            "dataset": PREFIX + row["kind"],
            "data_dir": str(row["tokens"]),
            "model": row["model"],
            "device": row["device"],
            "press_name": self.press_name,
            "compression_ratio": self.compression_ratio,
            **ABSENT,
            "query_aware": self._is_query_aware,
            "output_dir": str(out),
            "model_kwargs": {"dtype": row["dtype"]},
            "press_init_command": row["spelling"],
            "seed": row["seed"],
        }

    def metrics(self) -> dict[str, dict[str, float]]:
        """Mean score in percent, by kind of question and name of the score."""
        scores = dict[tuple[str, str], list[float]]()
        for _, item in self._items():
            scores.setdefault((item["kind"], item["scored_by"]), []).append(item["own"])
        out = dict[str, dict[str, float]]()
        for (kind, name), score in sorted(scores.items()):
            out.setdefault(kind, {})[name] = round(100 * fmean(score), 2)
        return out

    def predictions(self) -> list[dict[str, object]]:
        """Answers, one per question."""
        return [
            {
                "task": item["kind"],
                "seed": row["seed"],
                "question": item["question"],
                "predicted_answer": item["answer"],
                "score": item["own"],
                "compression_ratio": round(1.0 - row["bytes_share"], 4),
            }
            for row, item in self._items()
        ]

    @property
    def _is_query_aware(self) -> bool:
        """True if the question was read before the cache was compressed."""
        return self.cells[0]["question"] == "inside"

    def _items(self) -> Iterator[tuple[Row, Row]]:
        """Scored items with their cells."""
        return ((row, item) for row in self.cells for item in scored_items(row))


def scored_items(row: Row) -> list[Row]:
    """Items of a cell that were generated and scored as their data set scores."""
    if row["measure"] != GENERATED:
        return []
    return [item for item in row.get("items", ()) if item["counts"] and "own" in item]


def leaderboard_runs(results: Results) -> list[LeaderboardRun]:
    """Runs of all measured cells that can be exported, in the order of their first cells.

    Raises:
        InputError: there is none.
    """
    runs = dict[CellKey, list[Row]]()
    for row in results.measured:
        if scored_items(row):
            runs.setdefault(cell_key(row)._replace(seed=0), []).append(row)
    if not runs:
        raise InputError(
            "The results hold no generated answers that a data set scores: measure some, as by "
            "larder bench --study ruler."
        )
    return [LeaderboardRun(tuple(cells)) for cells in runs.values()]


def export_runs(runs: Iterable[LeaderboardRun], out: Path) -> list[Path]:
    """Folders written, one per run; as in kvpress, the second run of a name gets a number inside.

    Args:
        out: folder of all runs, created if missing.

    Raises:
        InputError: a file cannot be written, or a run of before would be overwritten.
    """
    written, names = list[Path](), Counter[str]()
    for run in runs:
        before = names[run.folder_name]
        names[run.folder_name] += 1
        folder = out / run.folder_name / (str(before) if before else "")
        _write_run(run, folder, out)
        written.append(folder)
    return written


def _write_run(run: LeaderboardRun, folder: Path, out: Path) -> None:
    table = io.StringIO()
    writer = csv.DictWriter(table, PREDICTION_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(run.predictions())
    # A line of JSON per field is YAML.
    config = "".join(f"{name}: {json.dumps(value)}\n" for name, value in run.config(out).items())
    texts = {
        "config.yaml": config,
        "metrics.json": json.dumps(run.metrics(), indent=4) + "\n",
        "predictions.csv": table.getvalue(),
    }
    try:
        if (folder / "metrics.json").exists():
            raise InputError(
                f"{folder} holds results already, which stay as they are: name another --out."
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror}): name another place with --out."
        ) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Export results files, and print the folders."""
    parser = argparse.ArgumentParser(prog="larder_bench.reports.kvpress_leaderboard")
    parser.add_argument("results", nargs="+", type=Path, help="JSONL files, or folders of them")
    parser.add_argument("--out", type=Path, default=Path("leaderboard"), help="folder of all runs")
    chosen = parser.parse_args(arguments)
    for folder in export_runs(leaderboard_runs(read_results(chosen.results)), chosen.out):
        print(folder)


if __name__ == "__main__":
    main()
