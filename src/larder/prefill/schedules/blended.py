"""Contexts read apart and blended: cached chunks at any position, some tokens recomputed.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion"
(2024), arXiv:2405.16444, section 4; `larder.models.cacheblend` has the method. Every context is
read once, behind the text that all contexts share. In a prompt its keys are rotated to their new
positions, and the tokens whose values deviate most in the second layer are computed again in all
deeper ones, so that they see the contexts before theirs. Larder chooses them among the cached
tokens of all contexts together, as the released code.

Without contexts the schedule is `whole()`. The tokens behind the contexts, and the last ones that a
scorer observes, are read as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from larder.core.arguments import require
from larder.models.cacheblend import ContextChunk, blend
from larder.prefill.base import ContextReuse, ContextText, Steps
from larder.prefill.contexts import ChunkReader, ChunkSource, nbytes_of
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.prefill.schedules._chunk_schedule import ChunkedSchedule


@dataclass(frozen=True)
class Blended(ChunkedSchedule):
    """Contexts read apart, with a share of their tokens recomputed in place (CacheBlend).

    Args:
        recompute: share of the tokens of contexts that are computed again where they stand, in
            [0, 1]; 0 only rotates keys, 1 is a full prefill.
    """

    recompute: float = 0.15
    takes_reused_chunks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.recompute <= 1, "blended.recompute", "a share in [0, 1]", self.recompute)

    def context_steps(
        self,
        reader: PrefillReader,
        sequence: PrefillSequence,
        text: ContextText,
        source: ChunkSource,
    ) -> Steps[ContextReuse]:
        self.check(reader)
        ids, total = text.ids, len(text.ids)
        chunk_reader, done = ChunkReader(reader.decoder, text.prefix, source), len(text.prefix)
        chunks, is_known = list[ContextChunk](), list[bool]()
        if (prefix := chunk_reader.prefix()) is not None:
            chunks.append(ContextChunk(text.prefix, prefix))
        for context in text.contexts:
            entries, found = chunk_reader.chunk(context)
            chunks.append(ContextChunk(context, entries))
            is_known.append(found)
            done += len(context)
            yield done, total
        chunks = _cut(chunks, self.reused_tokens(reader, text))
        recomputed = 0
        if chunks:
            blended = blend(reader.decoder, chunks, self.recompute, len(text.prefix))
            held = nbytes_of([blended.entries, *(p.entries for p in chunks if p.entries)])
            sequence.cache.allocate(total)
            blended.entries.append_to(sequence.cache)
            reader.meter.observe([sequence.cache], held)
            recomputed = int((blended.chosen >= len(text.prefix)).sum())
        rest = ids[sequence.cache.next_position :]
        yield from reader.read_and_evict_steps((sequence,), rest, ids, 0)
        reader.finish(sequence)
        yield total, total
        lengths = tuple(map(len, text.contexts))
        behind = max(0, len(rest) - len(text.suffix))  # the last context, read as usual
        return ContextReuse(lengths, tuple(is_known), min(sum(lengths), recomputed + behind))


def _cut(chunks: Sequence[ContextChunk], count: int) -> list[ContextChunk]:
    """First `count` tokens of some chunks."""
    cut = list[ContextChunk]()
    for chunk in chunks:
        taken = min(len(chunk.ids), count)
        if taken > 0:
            entries = None if chunk.entries is None else chunk.entries.first(taken)
            cut.append(ContextChunk(chunk.ids[:taken], entries))
        count -= taken
    return cut


Part = Blended
