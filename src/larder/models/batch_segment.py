"""Batch segment: tokens of one sequence in a forward batch, and the cache that they continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from larder.cache.sequence import SequenceCache
from larder.core.images import NO_IMAGES, ImageSpans
from larder.core.types import AppendKind


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
