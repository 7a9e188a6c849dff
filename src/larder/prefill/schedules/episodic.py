"""Read block by block into several caches at once: one batched pass instead of one per episode.

The weights are read once per block for all caches of a group, which neither the EpiCache paper
(arXiv:2509.17396) nor its released code does. All caches of a group live at the same time: the
bound on entries is that of `blockwise` times their number. Results equal `blockwise`. No paper.

On a CPU one pass for four episodes took 1.07 times as long as four passes and 1.4 times their
memory (`benchmarks/speed.py episodes`), so there the default reads one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from larder.core.cutting import even_ranges
from larder.core.errors import BadParameter
from larder.prefill.base import Schedule, Steps, prefill_blocks
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.prefill.room import max_parallel_caches


class Together(Enum):
    """How many caches are read together, where no number is given.

    FITTING: as many as fit into an accelerator's free memory; one after the other on a CPU.
    ALL: all of them.
    """

    FITTING = "fitting"
    ALL = "all"


@dataclass(frozen=True)
class Episodic(Schedule):
    """A plan after every block, for several caches together.

    Args:
        tokens: M_block, the most tokens read between two plans; blocks are of nearly the same
            length. Left out, the smaller of 512 and the budget.
        together: the most caches read in one pass, in groups of nearly the same size; or
            `max_parallel_caches`, as many as an accelerator's free memory holds and one on a CPU;
            or `all`.
    """

    tokens: int | None = None
    together: int | Together = Together.FITTING

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise BadParameter(f"episodic.tokens must be at least 1, got {self.tokens}.")
        if isinstance(self.together, int) and self.together < 1:
            raise BadParameter(
                f'episodic.together must be at least 1 cache, "fitting" or "all", '
                f"got {self.together}."
            )

    def steps(
        self, reader: PrefillReader, lanes: Sequence[PrefillSequence], ids: tuple[int, ...]
    ) -> Steps[None]:
        block = self.tokens or len(ids)
        most = self._together(reader, lanes, ids, block)
        groups = [lanes[start:stop] for start, stop in even_ranges(len(lanes), most)]
        return prefill_blocks(reader, groups, ids, block)

    def _together(
        self,
        reader: PrefillReader,
        lanes: Sequence[PrefillSequence],
        ids: tuple[int, ...],
        block: int,
    ) -> int:
        if self.together is Together.ALL:
            return len(lanes)
        if self.together is Together.FITTING:
            return max_parallel_caches(reader, lanes, ids, block)
        return self.together


Part = Episodic
