"""Batch segment: tokens of one sequence in a forward batch, and the cache that they continue; and
segments that read a block in the same layer, by one attention call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.forms.base import AttentionCall, CacheLayer
from larder.cache.new_tokens import NewTokens
from larder.cache.sequence import SequenceCache
from larder.core.errors import CacheError
from larder.core.images import NO_IMAGES, ImageSpans
from larder.core.spec import LayerSpec
from larder.core.types import AppendKind, Keys, Queries, Values
from larder.ops.block_attention import FEWEST_QUERIES, BlockAttention, is_faster
from larder.ops.cpu.block_attention import BlockWork
from larder.ops.cpu.decode_attention import MAX_HEAD_DIM, MAX_QUERY_ROWS
from larder.ops.cpu.segment_attention import (
    PassAttention,
    StepWork,
    attend_segments,
    can_attend_pass,
    can_join,
)

if TYPE_CHECKING:  # not before they are needed
    from larder.cache.forms.dense import DenseLayer
    from larder.cache.step_tables import StepTables


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


class PassTables:
    """Storages of a pass that reads blocks, with decode steps beside them or without, as tables.

    One call attends in each layer, and none is made for each sequence. For caches that hold plain
    entries of full precision, no policy of which observes the pass. Storages stay in memory during
    the pass: a call between two layers may divide those that its caches share with these.

    Args:
        tables: of each segment.
        widths: tokens of each.
    """

    def __init__(self, tables: Sequence[StepTables], widths: Sequence[int]) -> None:
        self._tables, self._widths = tables, widths
        self._storages = [own.storages for own in tables]
        rows = np.stack([own.take_rows() for own in tables], 1)
        self._attention = PassAttention(rows, widths)

    @staticmethod
    def of(segments: Sequence[BatchSegment], dtype: torch.dtype) -> PassTables | None:
        """Tables of caches over keys and values of that type; None where layers are asked for each
        segment."""
        widths = [segment.num_tokens for segment in segments]
        is_served = (
            max(widths) >= FEWEST_QUERIES
            and all(width == 1 or width >= FEWEST_QUERIES for width in widths)
            and all(map(_is_plain_text, segments))
            and _are_plain_layers(segments[0].cache.spec.layers, dtype)
        )
        if not is_served:
            return None
        found = [segment.cache.step_layout(dtype) for segment in segments]
        tables = [own for own in found if own is not None]
        fits = map(_has_room, tables, widths)
        return PassTables(tables, widths) if len(tables) == len(found) and all(fits) else None

    def attend(
        self, layer: LayerSpec, sides: tuple[Queries, Keys, Values]
    ) -> Float[Tensor, "H N D"]:
        """Output of a layer, to which all tokens are appended. Raises: MemoryError."""
        return self._attention.attend(layer.index, *sides, layer.scaling)

    def finish(self) -> None:
        """Count the tokens, which all layers have.

        Raises:
            CacheError: a layer has another storage by now, without them.
        """
        for own, storages in zip(self._tables, self._storages, strict=True):
            pairs = zip(own.storages, storages, strict=True)
            if not own.is_current and any(now[0] is not then[0] for now, then in pairs):
                raise CacheError("A cache was given other storage while a block was read into it.")
        for own, width in zip(self._tables, self._widths, strict=True):
            own.count_block(width)


def _is_plain_text(segment: BatchSegment) -> bool:
    """True for one text behind the entries of a cache that has tables, and room for it."""
    cache, count = segment.cache, segment.num_tokens
    is_plain = not (segment.reread_ids or segment.shift or segment.images.spans)
    if not is_plain or len(segment.section_lengths) > 1 or not cache.always_has_tables:
        return False
    layers = cast("Sequence[DenseLayer]", cache.layers)  # no other form always has tables
    return all(count == 1 or layer.room >= count for layer in layers)


def _are_plain_layers(layers: Sequence[LayerSpec], dtype: torch.dtype) -> bool:
    """True if a kernel attends to blocks in all of these layers, and faster than torch does."""
    first = layers[0]
    return (
        can_attend_pass()
        and all(each.is_causal for each in layers)
        and first.query_heads // first.kv_heads <= MAX_QUERY_ROWS
        and first.head_dim <= MAX_HEAD_DIM
        and first.head_dim % 2 == 0
        and is_faster(dtype, first.head_dim)
    )


def _has_room(tables: StepTables, width: int) -> bool:
    return tables.block_room >= width
