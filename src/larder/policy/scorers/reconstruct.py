"""Scorer by attention while the model repeats the context (KVzip).

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025),
arXiv:2505.23416, section 3. The text just read is asked for again, chunk by chunk: a request to
repeat, then the chunk itself, read behind the cache; an entry's score is the highest weight it
gets. `paper` and `code` are KVzip's own, which agree, and do three things that `larder` does not:

- A weight is shared with the first `opening` tokens (the system prompt) and with the repeated copy
  up to the query; `larder` shares it among the chunk's own cached entries, so that no entry pays
  for how much the copy looks at itself.
- Chunks are cut at `chunk` tokens; `larder` cuts nearly equal ones. As a weight is a share of its
  chunk, entries of a short last chunk would outrank all others.
- A request after the first quotes the last tokens before its chunk. In the published code they
  close the request; here they open the answer.

All count chunks from the first token and judge the system prompt like everything else, which the
published code leaves out; what must stay is named by `protect`.

When the context is read block by block, the repeated block re-scores all survivors, as EpiCache
adapts the method (arXiv:2509.17396, appendix): nothing remembers older scores. EpiCache's released
code shares weights as `larder` does there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Observation, Prompts, ScratchPrompt
from larder.core.types import Packed, PackedMask, TokenIds, Variant
from larder.ops.apportionment import even_ranges
from larder.policy.attention_reduction import ObservationWindow
from larder.policy.scorers.base import AttentionScorer, select_keys, with_pass_keys

QUOTED = 8  # tokens of the chunk before that a request repeats; the paper's number


@dataclass(frozen=True)
class Reconstruct(AttentionScorer):
    """KVzip: the weight an entry gets while its surroundings are being repeated.

    Args:
        chunk: the most tokens repeated at a time.
        opening: tokens at the start that `paper` and `code` share every weight with: the length of
            the system prompt, if a context is read whole. Read block by block they are judged, and
            share weights, in any case; `larder` has no use for it.
        variant: `larder`, or `paper` and `code` as published.
    """

    chunk: int = 2048
    opening: int = 4
    variant: Variant = Variant.LARDER
    prompts = frozenset({"repeat"})

    def __post_init__(self) -> None:
        require(self.chunk >= 1, "reconstruct.chunk", "at least 1 token", self.chunk)
        require(self.opening >= 0, "reconstruct.opening", "0 or more", self.opening)

    def scratch(self, block: TokenIds, start: int, prompts: Prompts) -> tuple[ScratchPrompt, ...]:
        request, stop = tuple(prompts["repeat"]), start + len(block)
        if start > 0:
            return (ScratchPrompt(request + block, (0, stop)),)
        if self.variant is Variant.LARDER:
            cuts = even_ranges(len(block), self.chunk)
            return tuple(ScratchPrompt(request + block[a:b], (a, b)) for a, b in cuts)
        starts = range(0, len(block), self.chunk)
        return tuple(
            ScratchPrompt(
                request + block[max(0, a - QUOTED) : a + self.chunk],
                (a, min(a + self.chunk, len(block))),
            )
            for a in starts
        )

    def default_reduction(self) -> tuple[str, str]:
        return "max", "group_max"

    def observation_window(self, observation: Observation) -> ObservationWindow:
        if self.variant is Variant.LARDER:
            return ObservationWindow(
                observation.queries, observation.entries.position_range(*observation.span)
            )
        shared = select_keys(observation, self._shared(observation))
        return ObservationWindow(
            observation.queries, with_pass_keys(observation, shared), observation.query_positions
        )

    def finish(self, observation: Observation, heads: list[Float[Tensor, " _"]]) -> Packed:
        positions = observation.entries.packed_positions()
        judged = (positions >= observation.span[0]) & (positions < observation.span[1])
        looked_at = judged if self.variant is Variant.LARDER else self._shared(observation)
        whole = heads[0].new_full((len(positions),), -torch.inf)
        counts = [
            int(part.sum()) for part in torch.split(looked_at, list(observation.entries.lengths))
        ]
        pairs = zip(heads, counts, strict=True)
        whole[looked_at] = torch.cat([head[:count] for head, count in pairs])
        return whole.masked_fill(~judged, -torch.inf)

    def _shared(self, observation: Observation) -> PackedMask:
        """The cached entries that a weight is shared among."""
        positions = observation.entries.packed_positions()
        inside = (positions >= observation.span[0]) & (positions < observation.span[1])
        return inside | (positions < self.opening)


Part = Reconstruct
