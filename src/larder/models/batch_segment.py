"""Batch segment: tokens of one sequence in a forward batch, and the cache that they continue; and
segments that read a block in the same layer, by one attention call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.new_tokens import NewTokens
from larder.cache.sequence import SequenceCache
from larder.core.images import NO_IMAGES, ImageSpans
from larder.core.types import AppendKind, Queries
from larder.ops.block_attention import FEWEST_QUERIES, BlockAttention
from larder.ops.cpu.block_attention import BlockWork
from larder.ops.cpu.segment_attention import StepWork, attend_segments, can_join


@dataclass(frozen=True)
class BatchSegment:
    """Tokens of one sequence in a packed batch.

    Args:
        cache: the cache that they continue.
        ids: the tokens.
        sections: lengths that partition `ids` into texts that each continue the cache
            independently, as several questions in scratch mode; one section by default.
        shift: offset of the first position from the cache's next one, in tokens, negative for
            earlier; for scratch mode.
        append_kind: prefill or decode step, for append mode.
        reread_ids: tokens of the cache that are re-read in front of `ids`.
        reread_start: true position of the first of them.
        images: images among `ids`.
    """

    cache: SequenceCache
    ids: tuple[int, ...]
    sections: tuple[int, ...] = ()
    shift: int = 0
    append_kind: AppendKind = AppendKind.STEP
    reread_ids: tuple[int, ...] = ()
    reread_start: int = 0
    images: ImageSpans = NO_IMAGES

    @property
    def section_lengths(self) -> tuple[int, ...]:
        """Lengths of the sections, which is one where none are given."""
        return self.sections or (len(self.ids),)

    def positions(self) -> list[int]:
        """True positions of `ids`; every section starts at the cache's next one plus `shift`."""
        start = self.cache.next_position + self.shift
        return [start + offset for part in self.section_lengths for offset in range(part)]

    def all_positions(self) -> list[int]:
        """True positions of all tokens that the model computes, re-read ones included."""
        stop = self.reread_start + len(self.reread_ids)
        return [*range(self.reread_start, stop), *self.positions()]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes, re-read ones included."""
        return len(self.reread_ids) + len(self.ids)


def new_token_indices(segments: Sequence[BatchSegment]) -> list[int]:
    """Indices, in the packed batch, of the tokens that are not re-read."""
    indices, start = list[int](), 0
    for segment in segments:
        indices += range(start + len(segment.reread_ids), start + segment.num_tokens)
        start += segment.num_tokens
    return indices


def new_hidden(
    segments: Sequence[BatchSegment], hidden: Float[Tensor, "N hidden"]
) -> list[Float[Tensor, "_ hidden"]]:
    """Hidden states of each segment without those of tokens that were read again."""
    given = hidden.split([segment.num_tokens for segment in segments])
    pairs = zip(given, segments, strict=True)
    return [part[len(segment.reread_ids) :] for part, segment in pairs]


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
