"""Keep what the model needs to repeat the context.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025),
arXiv:2505.23416, section 3. The text just read is asked for again, chunk by chunk: a request to
repeat, then the chunk itself, read behind the cache; an entry's score is the highest weight it
gets. Differs from the paper:

- A weight is normalised over the chunk's own cached entries; the paper's also runs over the
  system prompt and over the repeated copy's keys.
- Chunks are of nearly the same length. As a weight is a share of its chunk, entries of a short
  last chunk would outrank all others.
- A request after the first does not quote the last tokens of the chunk before it.
- The system prompt belongs to the first chunk and is judged like everything else; what must stay
  is named by `protect`.

When the context is read block by block, the repeated block re-scores all survivors, as EpiCache
adapts the method (arXiv:2509.17396, appendix): nothing remembers older scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from larder.core.cutting import even_cuts
from larder.core.errors import BadParameter
from larder.core.observation import Prompts, Scratch, Seen
from larder.core.types import Packed
from larder.policy.scorers._attention import highest_weights
from larder.policy.scorers.base import Scorer


@dataclass(frozen=True)
class Reconstruct(Scorer):
    """KVzip: the weight an entry gets while its surroundings are being repeated.

    Args:
        chunk: the most tokens repeated at a time.
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
        return tuple(
            Scratch(request + block[first:last], (first, last))
            for first, last in even_cuts(len(block), self.chunk)
        )

    def score(self, seen: Seen) -> Packed:
        asked = seen.entries.between(*seen.span)
        scores = highest_weights(seen.queries, asked, seen.layer.scaling)
        whole = scores.new_full((sum(seen.entries.lengths),), -torch.inf)
        positions = seen.entries.packed_positions()
        whole[(positions >= seen.span[0]) & (positions < seen.span[1])] = scores
        return whole


Part = Reconstruct
