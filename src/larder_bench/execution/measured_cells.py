"""Measured cells of a run, whose results apply to cells that are not measured yet."""

from __future__ import annotations

from collections.abc import Iterable

from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.studies.cells import Cell

CellSetting = tuple[str, ...]
_HEAD = ("task", "tokens", "spelling", "budget", "question", "matched")


class MeasuredCells:
    """Measured cells of a run: first guesses of budgets in bytes, and results that other cells
    share.

    Args:
        rows: cells of this run and model in the file. Rows of other runs must be left out, so
            that the former contents of a file change nothing.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._guesses: dict[CellSetting, tuple[int, float]] = {}
        self._alike: dict[CellSetting, Row] = {}
        for row in rows:
            setting = tuple(str(row[name]) for name in _HEAD)
            self._keep(setting, row["seed"], row["measure"], row)

    def learn(self, cell: Cell, measured: Row) -> None:
        """Store the result of a cell."""
        self._keep(
            cell.setting, cell.seed, cell.measure, measured | {"matched": cell.matched.value}
        )

    def tokens_per_byte(self, cell: Cell) -> float | None:
        """Tokens per byte measured with the first seed; None for the first seed itself, or if that
        cell was refused.
        """
        seed, tokens_per_byte = self._guesses.get(cell.setting, (cell.seed, None))
        return tokens_per_byte if seed < cell.seed else None

    def source(self, cell: Cell) -> int | None:
        """Seed that the first guess of a cell comes from; None if there is none."""
        return self._guesses[cell.setting][0] if cell.setting in self._guesses else None

    def shared_row(self, cell: Cell) -> Row | None:
        """Result of an equivalent cell that differs only in the matched quantity, or None."""
        if not cell.is_alike:
            return None
        row = self._alike.get(_unmatched_setting(cell.setting, cell.seed, cell.measure))
        if row is None or row["matched"] == cell.matched.value:
            return None
        fields = {n: value for n, value in row.items() if n not in (*cell.head({}), EXHIBITS_KEY)}
        return fields | {"shared_with": row["matched"]}

    def _keep(self, setting: CellSetting, seed: int, measure: str, row: Row) -> None:
        self._alike.setdefault(_unmatched_setting(setting, seed, measure), row)
        if "budget_tokens" in row and seed <= self._guesses.get(setting, (seed, 0.0))[0]:
            nbytes = row["kv_bytes"] if setting[-1] == "total" else row["active_kv_bytes"]
            self._guesses[setting] = seed, row["budget_tokens"] / max(1, nbytes)


def _unmatched_setting(setting: CellSetting, seed: int, measure: str) -> CellSetting:
    """Key of a cell without its matched quantity."""
    return (*setting[:-1], str(seed), measure)
