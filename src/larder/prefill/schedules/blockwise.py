"""Chunked (blockwise) prefill with eviction after each block: memory is at most budget + block.

Kim et al., "EpiCache: Episodic KV Cache Management for Long-Term Conversation on
Resource-Constrained Environments" (2025), arXiv:2509.17396, section 2.2. Several caches, such as
those of episodes, are built one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from larder.core.errors import BadParameter
from larder.core.types import TokenIds
from larder.prefill.base import Schedule, Steps, prefill_blocks
from larder.prefill.reader import PrefillGroup, PrefillReader


@dataclass(frozen=True)
class Blockwise(Schedule):
    """Prefill with a plan after every block.

    Args:
        tokens: M_block, most tokens read between two plans; blocks have nearly equal
            lengths. Open, the smaller of 512 and the budget.
    """

    tokens: int | None = None
    has_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise BadParameter(f"blockwise.tokens must be at least 1, got {self.tokens}.")

    @property
    def block_tokens(self) -> int | None:
        return self.tokens

    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        return prefill_blocks(
            reader, [(sequence,) for sequence in sequences], ids, self.tokens or len(ids)
        )


Part = Blockwise
