"""Contexts as they were in earlier texts, with the tokens that looked outward computed again.

Agarwal et al., "Cache-Craft: Managing Chunk-Caches for Efficient Retrieval-Augmented Generation"
(2025), arXiv:2502.15734. A chunk is first computed where it stands, and kept with its attention to
the chunks before it (inter), to itself (intra), and of each token to those before
(`ChunkProfile`). In a later text the share of its tokens that is computed again is

    alpha x sigmoid(inter / intra, per pair of tokens) x (1 - overlap)

where the overlap is the part of its old outer attention whose chunks stand before it again, less
for pairs that changed their order; tokens with most outer attention are computed first. Of several
variants of a chunk that of the least share is used; one whose share would exceed `renewed` is
computed whole and kept as another variant. Formulas are of a secondary account of the paper.

Inferred: the prefix that all texts share does not count as a chunk; a chunk that stood first and
stands elsewhere has no overlap; `renewed`. Variants live in a source that keeps them
(`ChunkMemory`); with others contexts are read as one text. Without contexts this is `whole()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from larder.core.arguments import require
from larder.models.cacheblend import ContextChunk
from larder.models.chunk_recompute import recompute_tokens
from larder.prefill.base import ContextReuse, ContextText, Steps
from larder.prefill.contexts import ChunkReader, ChunkSource, ChunkVariant
from larder.prefill.reader import PrefillReader, PrefillSequence
from larder.prefill.schedules._chunk_schedule import ChunkedSchedule


@dataclass(frozen=True)
class Crafted(ChunkedSchedule):
    """Contexts reused as they were in earlier texts, by their attention there (Cache-Craft).

    Args:
        alpha: factor on the share that is computed again; the paper takes the least that holds
            the quality of a validation set.
        renewed: share beyond which a chunk is computed whole, in [0, 1].
    """

    alpha: float = 1.0
    renewed: float = 0.6

    def __post_init__(self) -> None:
        require(0 <= self.alpha < math.inf, "crafted.alpha", "0 or more", self.alpha)
        require(0 <= self.renewed <= 1, "crafted.renewed", "a share in [0, 1]", self.renewed)

    @property
    def context_copies(self) -> int:
        return 3  # chunks, what is computed, and the variants that are kept of it

    def context_steps(
        self,
        reader: PrefillReader,
        sequence: PrefillSequence,
        text: ContextText,
        source: ChunkSource,
    ) -> Steps[ContextReuse]:
        self.check(reader)
        chunk_reader = ChunkReader(reader.decoder, text.prefix, source)
        limit, first = self.reused_tokens(reader, text), int(bool(text.prefix))
        chunks, chosen, fresh = list[ContextChunk](), list[int](), list[int]()
        if (prefix := chunk_reader.prefix()) is not None:
            kept = min(len(text.prefix), limit)
            chunks.append(ContextChunk(text.prefix[:kept], prefix.first(kept)))
        is_known, again, start = list[bool](), 0, min(len(text.prefix), limit)
        for context_index, ids in enumerate(text.contexts):
            count = max(0, min(len(ids), limit - start))
            best = self._best(reader, source, text, context_index)
            if best is None:
                if count == len(ids):
                    fresh.append(len(chunks))
                chunks.append(ContextChunk(ids[:count]))
                tokens = list(range(count))
            else:
                share = best.profile.share(text.contexts[:context_index], self.alpha)
                outward = best.profile.most_outward(math.ceil(share * len(ids)))
                tokens = [token for token in outward if token < count]
                chunks.append(ContextChunk(ids[:count], best.entries.first(count)))
                again += len(tokens)
            is_known.append(best is not None)
            chosen += [start + token for token in tokens]
            start += count
        yield start, len(text.ids)
        rows = torch.tensor(chosen, dtype=torch.int64, device=reader.decoder.spec.device)
        made = recompute_tokens(reader.decoder, chunks, rows, fresh, first)
        edges = [0]
        for chunk in chunks:
            edges.append(edges[-1] + len(chunk.ids))
        for index, profile in made.profiles.items():
            entries = made.entries.slice(edges[index], edges[index + 1])
            source.add_variant(text.prefix, chunks[index].ids, ChunkVariant(entries, profile))
        return (yield from self.finish(reader, sequence, text, made.entries, is_known, again))

    def _best(
        self, reader: PrefillReader, source: ChunkSource, text: ContextText, index: int
    ) -> ChunkVariant | None:
        """Variant of a context of which least is computed again; None where it is to be renewed."""
        ids, now = text.contexts[index], text.contexts[:index]
        known = source.variants(reader.decoder.spec, text.prefix, ids)
        shares = [variant.profile.share(now, self.alpha) for variant in known]
        if not shares or min(shares) > self.renewed:
            return None
        return known[shares.index(min(shares))].to(reader.decoder.spec.device)


Part = Crafted
