"""Clustering of entries with similar keys; every cluster becomes its mean (Chelsea).

Hu et al., "Efficient Long-Context LLM Inference via KV Cache Clustering" (2025), arXiv:2506.11418
(Chelsea): chunked soft matching. A head's entries are cut into chunks; those of a chunk belong to
two halves by turns, and each of the first half is matched with the entry of the second half whose
key is most similar. The most similar matches of the head are merged into means of keys and values,
at most half of the entries at a time, and this is repeated until the head fits its budget. We have
read a description of the method, and found no released code.

The matching decides what goes: of scorer and budget only the number of entries per head is taken.
What is protected takes no part (inferred), and what a head has no room for beside it is forgotten.
Inferred as well: chunks are cut again of the clusters that are left after each round, a cluster
stands where the last entry of the second half stood, and while text is generated entries are
matched like those that were read, once a chunk of them has come (`lagged(tokens=64)`). The
similarity is the cosine of cached (rotated) keys. Counts are our addition: a cluster weighs as many
tokens as it stands for, in means and, by ln n, in attention. Means of means are then means of
tokens, however often a cache is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import normalize

from larder.core.arguments import require
from larder.core.observation import Entries, LayerScores
from larder.core.part import LOG_COUNT, Ledger
from larder.core.plan import Plan
from larder.policy.compensation._token_merge import (
    Indices,
    heads_of,
    kept_mask,
    merge_by_count,
    rejected_indices,
    rejected_rows,
    unique_targets,
)
from larder.policy.compensation.base import Compensation

ROWS = 1 << 16  # keys that are compared at once: 32 MiB of keys of size 128


@dataclass(frozen=True)
class Chelsea(Compensation):
    """Chelsea's chunked soft matching.

    Args:
        chunk: entries among which is matched.
    """

    chunk: int = 64
    ledger = Ledger(columns=(LOG_COUNT,))

    def __post_init__(self) -> None:
        require(self.chunk >= 2, "chelsea.chunk", "at least 2", self.chunk)

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        if not len(rejected_indices(plan, entries)):
            return plan
        spared = kept_mask(plan, entries) & scored.protected
        free = torch.nonzero(~spared).flatten()
        room = torch.tensor(plan.lengths, device=free.device)
        room -= _counts(torch.nonzero(spared).flatten(), entries)
        free = free[room[heads_of(free, entries)] > 0]
        roots = self._clustered(free, room, entries)
        kept = torch.cat([torch.nonzero(spared).flatten(), roots.unique()]).sort().values  # pyright: ignore
        joins = free != roots
        chosen = replace(plan, kept=kept)
        return merge_by_count(chosen, entries, free[joins], roots[joins])

    def _clustered(
        self, free: Indices, room: Int64[Tensor, " K"], entries: Entries
    ) -> Int64[Tensor, " N"]:
        """Cluster root of each free entry, so that no head exceeds its capacity."""
        keys = entries.keys[rejected_rows(free, entries)].float()
        counts = entries.column(LOG_COUNT)[free].exp()
        heads = heads_of(free, entries)
        roots = torch.arange(len(free), device=free.device)
        while True:
            alive, _ = unique_targets(roots)
            excess = torch.bincount(heads[alive], minlength=len(room)) - room
            if not bool((excess > 0).any()):
                return free[roots]
            alive = alive[excess[heads[alive]] > 0]
            likeness, sources, targets = self._matches(alive, heads[alive], keys)
            best = _best(likeness, heads[sources], excess)
            _merge(keys, counts, sources[best], targets[best])
            moved = torch.arange(len(free), device=free.device)
            moved[sources[best]] = targets[best]
            roots = moved[roots]

    def _matches(
        self, alive: Indices, heads: Indices, keys: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, " M"], Int64[Tensor, " M"], Int64[Tensor, " M"]]:
        """Similarity, entry of a first half, and its most similar entry of the second half."""
        grid = self._chunks(alive, heads)
        matches: list[tuple[Tensor, Tensor, Tensor]] = []
        for some in torch.split(grid, max(ROWS // self.chunk, 1)):
            ones, others = some[:, 0::2], some[:, 1::2]
            likeness = normalize(keys[ones], dim=-1) @ normalize(keys[others], dim=-1).mT
            best = likeness.masked_fill((others < 0)[:, None], -torch.inf).max(-1)
            matched = (ones >= 0) & (best.values > -math.inf)
            targets = others.gather(1, best.indices)
            matches.append((best.values[matched], ones[matched], targets[matched]))
        likeness, sources, targets = zip(*matches, strict=True)
        return torch.cat(likeness), torch.cat(sources), torch.cat(targets)

    def _chunks(self, alive: Indices, heads: Indices) -> Int64[Tensor, "N C"]:
        """Entries by chunk, heads separate; -1 where a chunk is not full."""
        lengths = torch.bincount(heads)
        ranks = torch.arange(len(alive), device=alive.device)
        ranks -= (lengths.cumsum(0) - lengths)[heads]
        numbers = (ranks % self.chunk == 0).long().cumsum(0) - 1
        grid = alive.new_full((int(numbers[-1]) + 1, self.chunk), -1)
        grid[numbers, ranks % self.chunk] = alive
        return grid


def _counts(packed: Indices, entries: Entries) -> Int64[Tensor, " K"]:
    """Number of packed entries in each head."""
    return torch.bincount(heads_of(packed, entries), minlength=len(entries.lengths))


def _best(likeness: Tensor, heads: Indices, most: Int64[Tensor, " K"]) -> Indices:
    """Most similar matches of each head, at most its excess; ties go to the first."""
    order = torch.argsort(likeness, descending=True, stable=True)
    order = order[torch.argsort(heads[order], stable=True)]
    counts = torch.bincount(heads, minlength=len(most))
    ranks = torch.arange(len(heads), device=heads.device) - (counts.cumsum(0) - counts)[heads]
    return order[ranks < most[heads]].sort().values  # heads ascend in either order


def _merge(keys: Tensor, counts: Tensor, sources: Indices, targets: Indices) -> None:
    """Targets become the means of themselves and their sources, in place."""
    unique, indices = unique_targets(targets)
    sums = keys[unique] * counts[unique, None]
    sums.index_add_(0, indices, keys[sources] * counts[sources, None])
    counts.index_add_(0, targets, counts[sources])
    keys[unique] = sums / counts[unique, None]


Part = Chelsea
