"""Measured cells of a run, whose results apply to cells that are not measured yet."""

from __future__ import annotations

from collections.abc import Iterable

from larder_bench.results.rows import EXHIBITS_KEY, Row
from larder_bench.studies.cells import Cell

CellPlace = tuple[str, ...]
_HEAD = ("task", "tokens", "spelling", "budget", "matched")


class MeasuredCells:
    """First guesses at budgets in bytes, and cells that come to the same as another one.

    Args:
        rows: of the cells of this run and model that the file holds. Others do not count, so that
            what a file held before changes nothing.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._guesses: dict[CellPlace, tuple[int, float]] = {}
        self._alike: dict[CellPlace, Row] = {}
        for row in rows:
            place = tuple(str(row[name]) for name in _HEAD)
            self._keep(place, row["seed"], row["measure"], row)

    def learn(self, cell: Cell, measured: Row) -> None:
        """Remember what a cell came to."""
        self._keep(cell.place, cell.seed, cell.measure, measured | {"matched": cell.matched.value})

    def guess(self, cell: Cell) -> float | None:
        """Tokens per byte that the first seed came to; nothing for the first itself, or where that
        was refused.
        """
        seed, guess = self._guesses.get(cell.place, (cell.seed, None))
        return guess if seed < cell.seed else None

    def source(self, cell: Cell) -> int | None:
        """The seed that a cell's first guess comes from; None where there is none."""
        return self._guesses[cell.place][0] if cell.place in self._guesses else None

    def shared_row(self, cell: Cell) -> Row | None:
        """What the cell comes to, where one that differs in what is held equal has told."""
        if not cell.is_alike:
            return None
        found = self._alike.get(_unmatched_place(cell.place, cell.seed, cell.measure))
        if found is None or found["matched"] == cell.matched.value:
            return None
        told = {n: value for n, value in found.items() if n not in (*cell.head({}), EXHIBITS_KEY)}
        return told | {"shared_with": found["matched"]}

    def _keep(self, place: CellPlace, seed: int, measure: str, row: Row) -> None:
        self._alike.setdefault(_unmatched_place(place, seed, measure), row)
        if "budget_tokens" in row and seed <= self._guesses.get(place, (seed, 0.0))[0]:
            nbytes = row["kv_bytes"] if place[-1] == "total" else row["active_kv_bytes"]
            self._guesses[place] = seed, row["budget_tokens"] / max(1, nbytes)


def _unmatched_place(place: CellPlace, seed: int, measure: str) -> CellPlace:
    """The cell's place whatever is held equal."""
    return (*place[:-1], str(seed), measure)
