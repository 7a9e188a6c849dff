"""Cells of a table as JSON lines: a file under a case at a share of its bytes.

The key of a line holds the spelling of the policy and a label for the code, so that a changed
policy is measured anew, and old lines stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from larder.bench.amounts import Amount, Matched
from larder.bench.cases import Case
from larder.bench.equal_bytes import Wanted, figures_of
from larder.bench.rows import Row
from larder.bench.tables import Entry
from larder.core.spec import ModelSpec
from larder.session.memory import Memory

WHOLE = "1"
SMALLER = ("1/4", "1/8", "1/16")


@dataclass(frozen=True)
class Cell:
    """What one line measures.

    Args:
        file: the path of what is read.
        share: of the bytes of the full cache.
    """

    file: Path
    case: Case
    share: str

    def head(self, code: str) -> Row:
        """What the line starts with, by which it is found again."""
        return {
            "file": self.file.stem,
            "policy": self.case.name,
            "share": self.share,
            "spelling": str(self.case.policy),
            "code": code,
        }


def all_cells(
    files: Sequence[Path], cases: Sequence[Case], shares: Sequence[str]
) -> Iterator[Cell]:
    """Case by case; the full cache at its own share only."""
    for case in cases:
        for share in (WHOLE,) if case.is_full else shares:
            for file in files:
                yield Cell(file, case, share)


def key(row: Row) -> tuple[str, ...]:
    """What no two lines of a file have in common."""
    return tuple(row[name] for name in ("file", "policy", "share", "spelling", "code"))


def entries(rows: Sequence[Row]) -> list[Entry]:
    """Lines as tables take them."""
    return [
        Entry(
            row["policy"],
            row["share"],
            row["file"],
            tuple(item for item in row.get("items", ()) if item["counts"]),
            row.get("bytes_share", 0.0),
            "refused" in row,
        )
        for row in rows
    ]


@dataclass(frozen=True)
class Sizer:
    """Finds budgets; what it learns of a policy's bytes per token makes the next guess better.

    Args:
        learned: tokens per byte, by case and share.
    """

    spec: ModelSpec
    learned: dict[tuple[str, str], float] = field(default_factory=dict)

    def read(
        self, cell: Cell, context_tokens: int, read: Callable[[int], Memory]
    ) -> tuple[Memory, Row]:
        """What was read at the cell's share of the full bytes, and the figures of it.

        Args:
            read: reads the source under a budget in tokens per kv head.

        Raises:
            LarderError: the policy refuses every budget that is small enough.
        """
        if cell.case.is_full:
            memory = read(context_tokens)
            return memory, figures_of(memory.figures) | {"reads": 1}
        wanted = Wanted(Amount.parse(cell.share), Matched.BYTES, context_tokens, self.spec)
        place = cell.case.name, cell.share
        found = wanted.read(read, self.learned.get(place))
        self.learned[place] = found.tokens / found.made.figures.active_kv_bytes
        return found.made, figures_of(found.made.figures) | {"reads": found.tries}
