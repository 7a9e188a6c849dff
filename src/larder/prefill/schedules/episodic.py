"""Read block by block into all caches at once: one batched pass instead of one pass per episode.

The weights are read once per block for all episodes, which neither the EpiCache paper
(arXiv:2509.17396) nor its released code does. All caches live at the same time: the bound on
entries is that of `blockwise` times the number of episodes. Results equal `blockwise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder.core.errors import BadParameter
from larder.prefill.base import Progress, Schedule, pieces
from larder.prefill.reader import Lane, Reader


@dataclass(frozen=True)
class Episodic(Schedule):
    """A plan after every block, for all caches together.

    Args:
        tokens: M_block, the most tokens read between two plans; blocks are of nearly the same
            length. Left out, the smaller of 512 and the budget.
    """

    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise BadParameter(f"episodic.tokens must be at least 1, got {self.tokens}.")

    def read(
        self, reader: Reader, lanes: Sequence[Lane], ids: tuple[int, ...], progress: Progress
    ) -> None:
        done = 0
        for block in pieces(ids, self.tokens or len(ids)):
            reader.settle(lanes, block, block, lanes[0].cache.next_position)
            done += len(block) * len(lanes)
            progress(done, len(ids) * len(lanes))
        for number, lane in enumerate(lanes, start=1):
            reader.finish(lane, lanes[number:])


Part = Episodic
