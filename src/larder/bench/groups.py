"""Which cells of a study may be measured at the same time, elsewhere.

All cells of one conversation stay together, because they share what is read of it. They wait for
the conversations of the same task and length before them where a first guess at a budget comes from
those (`larder.bench.known`); so it does not matter who measures what, or when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from larder.bench.cells import Cell
from larder.bench.known import Known
from larder.bench.rows import Row

Where = tuple[str, ...]  # task and length


@dataclass(frozen=True)
class Group:
    """Cells of one conversation, in order.

    Args:
        numbers: their places among all that are to be measured.
    """

    where: Where
    seed: int
    numbers: tuple[int, ...]


def groups_of(cells: Sequence[Cell]) -> list[Group]:
    """Cells by conversation, in the order in which these come first."""
    found: dict[tuple[Where, int], list[int]] = {}
    for number, cell in enumerate(cells):
        found.setdefault((cell.place[:2], cell.seed), []).append(number)
    return [Group(where, seed, tuple(each)) for (where, seed), each in found.items()]


def next_of(
    groups: Sequence[Group], running: Sequence[Group], cells: Sequence[Cell], known: Known
) -> Group | None:
    """The first of those left that need not wait; None where all have to."""
    for group in groups:
        others = (*groups, *running)
        before = [each.seed for each in others if each.where == group.where]
        first = min(before)
        if first == group.seed or _is_settled([cells[n] for n in group.numbers], first, known):
            return group
    return None


def rows_for(group: Group, rows: Mapping[Where, Sequence[Row]]) -> list[Row]:
    """What is known of other cells, and can matter to these."""
    return [row for row in rows.get(group.where, ()) if row["seed"] <= group.seed]


def _is_settled(cells: Sequence[Cell], first: int, known: Known) -> bool:
    """Whether all guesses come from seeds before the first that is not measured yet."""
    sources = (known.source(cell) for cell in cells if cell.amount is not None)
    return all(seed is not None and seed < first for seed in sources)
