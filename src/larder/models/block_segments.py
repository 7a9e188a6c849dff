"""Segments that read a block in the same layer of a forward batch: one attention call for them all.

Decode steps of other segments share the call. Blocks that the kernel does not serve, or that torch
attends to faster, keep calls of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.new_tokens import NewTokens
from larder.core.types import Queries
from larder.ops.block_attention import FEWEST_QUERIES, BlockAttention
from larder.ops.cpu.block_attention import BlockWork
from larder.ops.cpu.segment_attention import StepWork, attend_segments, can_join

if TYPE_CHECKING:
    from larder.models.batch_segment import BatchSegment


class BlockSegments:
    """Blocks of new tokens over layers of different sequences. Used once.

    Args:
        blocks: layer and new tokens, in one section without bidirectional spans, by segment.
    """

    def __init__(self, blocks: Mapping[int, tuple[CacheLayer, NewTokens]]) -> None:
        self._blocks = blocks
        self._calls = dict[int, AttentionCall]()
        for index, (layer, new) in blocks.items():
            if (call := layer.block_call(new)) is not None:
                self._calls[index] = call
        self._works = {
            index: BlockWork(call)
            for index, call in self._calls.items()
            if isinstance(call, BlockAttention) and call.can_join and can_join()
        }

    @staticmethod
    def of(
        layer: int, segments: Sequence[BatchSegment], new: Sequence[NewTokens]
    ) -> BlockSegments | None:
        """Those segments whose tokens see the entries and their predecessors alone.

        None where there are none.

        Args:
            new: tokens of each segment.
        """
        blocks = dict[int, tuple[CacheLayer, NewTokens]]()
        for index, (segment, own) in enumerate(zip(segments, new, strict=True)):
            is_text = len(own.section_lengths) == 1 and not own.bidirectional
            if is_text and len(own) >= FEWEST_QUERIES and not segment.reread_ids:
                blocks[index] = segment.cache.step_layer(layer), own
        return BlockSegments(blocks) if blocks else None

    def attend(self, step: StepWork | None) -> None:
        """Attend to the blocks that the kernel serves, and to decode steps, in one call.

        Raises:
            MemoryError: buffers could not be allocated.
        """
        if self._works:
            attend_segments(list(self._works.values()), step)
        elif step is not None:
            step.run()

    def output(self, index: int) -> Queries | None:
        """Output of a segment, whose tokens are appended; None where it attends by itself.

        Called once for each segment, behind `attend`.
        """
        if index not in self._calls:
            return None
        layer, new = self._blocks[index]
        work = self._works.get(index)
        state = self._calls[index]() if work is None else work.state
        return layer.finish_attention(new, state)
