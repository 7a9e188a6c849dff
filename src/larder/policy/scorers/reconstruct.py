"""Keep what the model needs to repeat the context.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025),
arXiv:2505.23416, section 3. The text just read is asked for again, chunk by chunk: a request to
repeat, then the chunk itself, read behind the cache; an entry's score is the highest weight it
gets. Differs from the paper: a weight is normalised over the chunk's own cached entries, without
the repeated copy's keys.

When the context is read block by block, the repeated block re-scores all survivors, as EpiCache
adapts the method (arXiv:2509.17396, appendix): nothing remembers older scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.errors import BadParameter
from larder.core.observation import Prompts, Scratch, Seen
from larder.core.types import Packed
from larder.policy.scorers._attention import highest_weights
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class Reconstruct(Scorer):
    """KVzip: the weight an entry gets while its surroundings are being repeated.

    Args:
        chunk: tokens repeated at a time.
    """

    chunk: int = 2048
    prompts = frozenset({"repeat"})

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise BadParameter(f"reconstruct.chunk must be at least 1 token, got {self.chunk}.")

    def scratch(self, block: tuple[int, ...], start: int, book: Prompts) -> tuple[Scratch, ...]:
        request, stop = tuple(book["repeat"]), start + len(block)
        if start > 0:
            return (Scratch(request + block, (0, stop)),)
        cuts = range(0, len(block), self.chunk)
        return tuple(
            Scratch(
                request + block[cut : cut + self.chunk],
                (start + cut, min(start + cut + self.chunk, stop)),
            )
            for cut in cuts
        )

    def score(self, seen: Seen) -> Packed:
        asked = seen.entries.between(*seen.span)
        scores = highest_weights(seen.queries, asked, seen.layer.scaling)
        whole = scores.new_full((sum(seen.entries.lengths),), -torch.inf)
        positions = seen.entries.packed_positions()
        whole[(positions >= seen.span[0]) & (positions < seen.span[1])] = scores
        return whole


Part = Reconstruct
