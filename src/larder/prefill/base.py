"""What every schedule can be asked: in what order a long input is eaten."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from larder.core.cutting import even_cuts
from larder.prefill.reader import Lane, Reader

# Called as tokens are read: (tokens read so far over all lanes, tokens to read over all lanes).
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Progress for nobody."""


class Schedule(ABC):
    """Says when plans are made while a context is read. A frozen dataclass without state.

    `tokens` is M_block, the most tokens read between two plans; None where there are no blocks.
    """

    tokens: int | None

    @abstractmethod
    def read(
        self, reader: Reader, lanes: Sequence[Lane], ids: tuple[int, ...], progress: Progress
    ) -> None:
        """Read `ids` into the cache of every lane and leave each within its budget."""


def read_blocks(
    reader: Reader,
    groups: Sequence[Sequence[Lane]],
    ids: tuple[int, ...],
    tokens: int,
    progress: Progress,
) -> None:
    """Read one group of lanes after the other, the lanes of a group together, a plan per block.

    Args:
        tokens: the most of one block.
    """
    done, total = 0, len(ids) * sum(len(group) for group in groups)
    for group in groups:
        for block in pieces(ids, tokens):
            reader.settle(group, block, block, group[0].cache.next_position)
            done += len(block) * len(group)
            progress(done, total)
        for number, lane in enumerate(group, start=1):
            reader.finish(lane, group[number:])


def pieces(ids: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Consecutive pieces of nearly the same length, at most `size` tokens each."""
    return [ids[start:stop] for start, stop in even_cuts(len(ids), size)]
