"""Contexts read apart and attended to side by side: adaptive parallel encoding (APE).

Yang et al., "APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel Encoding"
(2025), arXiv:2502.05431, section 4. Every context is read behind the same prefix, all at the same
positions, and sees no other context. What follows starts behind the longest of them, and attends to
contexts and other text in two branches (`larder.cache.forms.parallel`). Temperature and scale move
attention to contexts, which is spread over more of them, towards that of a text read in one piece;
the paper tunes both per model, the defaults are those of its demonstration.

The order of contexts does not matter, and no token of a known context is computed. Without contexts
the schedule is `whole()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from larder.cache.chunk_entries import ChunkEntries
from larder.cache.forms.parallel import ParallelLayer
from larder.cache.sequence import SequenceCache
from larder.core.errors import BadParameter, UsageError
from larder.core.spelling import spell
from larder.core.types import TokenIds
from larder.prefill.base import ContextReuse, ContextText, Schedule, Steps
from larder.prefill.contexts import (
    BLOCK_TOKENS,
    ChunkReader,
    ChunkSource,
    check_chunkable,
    nbytes_of,
)
from larder.prefill.reader import PrefillGroup, PrefillReader, PrefillSequence
from larder.prefill.schedules.whole import Whole


@dataclass(frozen=True)
class Parallel(Schedule):
    """Contexts read apart, in a branch of attention of their own (APE).

    Args:
        temperature: T, in (0, 1]; lower values concentrate attention within contexts.
        scale: S, in (0, 1]; lower values move attention from contexts to other text where the
            log-sum-exp is positive.
    """

    temperature: float = 0.9
    scale: float = 0.9
    cache_form: ClassVar[str] = "parallel"
    takes_reused_chunks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("temperature", "scale"):
            if not 0 < getattr(self, name) <= 1:
                raise BadParameter(
                    f"parallel.{name} must be a number in (0, 1], got {getattr(self, name)}."
                )

    def steps(self, reader: PrefillReader, sequences: PrefillGroup, ids: TokenIds) -> Steps[None]:
        return Whole().steps(reader, sequences, ids)

    def context_steps(
        self,
        reader: PrefillReader,
        sequence: PrefillSequence,
        text: ContextText,
        source: ChunkSource,
    ) -> Steps[ContextReuse]:
        check_chunkable(reader.decoder.spec, spell(self))
        if sequence.cache.cache_spec.form != self.cache_form:
            raise UsageError(
                f"{spell(self)} cannot evict or recompute entries, because those of several "
                "contexts have the same positions: write unlimited() behind it and nothing else, "
                "or take blended()."
            )
        chunks, done, total = ChunkReader(reader.decoder, text.prefix, source), 0, len(text.ids)
        contexts, is_known = list[ChunkEntries](), list[bool]()
        prefix = chunks.prefix()
        for context in text.contexts:
            entries, found = chunks.chunk(context)
            contexts.append(entries)
            is_known.append(found)
            done += len(context)
            yield done, total
        sequence.cache.allocate(len(text.prefix) + len(text.suffix))
        if prefix is not None:
            prefix.append_to(sequence.cache)
        self._hold(sequence.cache, contexts)
        reader.meter.observe([sequence.cache], nbytes_of(contexts))
        for start in range(0, len(text.suffix), BLOCK_TOKENS):
            reader.append((sequence,), text.suffix[start : start + BLOCK_TOKENS])
            yield None
        reader.finish(sequence)
        yield total, total
        return ContextReuse(tuple(map(len, text.contexts)), tuple(is_known))

    def _hold(self, cache: SequenceCache, contexts: Sequence[ChunkEntries]) -> None:
        """Hold contexts in every layer of a cache, whose next position is behind the longest."""
        device = cache.spec.device
        ranges = [(each.start, each.start + each.num_tokens) for each in contexts]
        positions = [torch.arange(*each, device=device) for each in ranges]
        for index, store in enumerate(cache.layers):
            assert isinstance(store, ParallelLayer)  # the form of this schedule
            sides = [each.keys[index] for each in contexts], [e.values[index] for e in contexts]
            store.hold_contexts(*sides, positions, self.temperature, self.scale)
        cache.advance(max(stop for _, stop in ranges) - cache.next_position)


Part = Parallel
