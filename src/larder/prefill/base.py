"""What every schedule can be asked: in what order a long input is eaten."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from larder.ops.apportion import even_ranges
from larder.prefill.reader import PrefillReader, PrefillSequence

# Called as tokens are read: (tokens read so far over all lanes, tokens to read over all lanes).
Progress = Callable[[int, int], None]

Result = TypeVar("Result")
# Work that pauses after every pass over tokens, where others may use the model; what it gives is
# what `Progress` is called with, if that has changed.
Steps = Generator[tuple[int, int] | None, None, Result]


def no_progress(done: int, total: int) -> None:
    """Progress for nobody."""


def run_steps(steps: Steps[Result], progress: Progress = no_progress) -> Result:
    """Work through to the end; what came of it."""
    while True:
        try:
            told = next(steps)
        except StopIteration as end:
            return end.value
        if told is not None:
            progress(*told)


class Schedule(ABC):
    """Says when plans are made while a context is read. A frozen dataclass without state.

    `tokens` is M_block, the most tokens read between two plans; None where there are no blocks.
    """

    tokens: int | None

    @abstractmethod
    def steps(
        self, reader: PrefillReader, lanes: Sequence[PrefillSequence], ids: tuple[int, ...]
    ) -> Steps[None]:
        """Read `ids` into the cache of every lane and leave each within its budget."""

    def read(
        self,
        reader: PrefillReader,
        lanes: Sequence[PrefillSequence],
        ids: tuple[int, ...],
        progress: Progress,
    ) -> None:
        """All steps, one after the other."""
        run_steps(self.steps(reader, lanes, ids), progress)


def prefill_blocks(
    reader: PrefillReader,
    groups: Sequence[Sequence[PrefillSequence]],
    ids: tuple[int, ...],
    tokens: int,
) -> Steps[None]:
    """Read one group of lanes after the other, the lanes of a group together, a plan per block.

    Args:
        tokens: the most of one block.
    """
    done, total = 0, len(ids) * sum(len(group) for group in groups)
    for group in groups:
        for block in split_blocks(ids, tokens):
            yield from reader.read_and_evict_steps(
                group, block, block, group[0].cache.next_position
            )
            done += len(block) * len(group)
            yield done, total
        for number, lane in enumerate(group, start=1):
            reader.finish(lane, group[number:])


def split_blocks(ids: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Consecutive pieces of nearly the same length, at most `size` tokens each."""
    return [ids[start:stop] for start, stop in even_ranges(len(ids), size)]
