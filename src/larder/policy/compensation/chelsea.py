"""Merge what is rejected into the kept entry of its chunk that is most like it.

Hu et al., "Efficient Long-Context LLM Inference via KV Cache Clustering" (2025), arXiv:2506.11418
(Chelsea): chunked soft matching. A head's entries are cut into chunks; those of a chunk belong to
two halves by turns; each is matched with the most similar key of the other half, and the most
similar matches are merged into means. We have read its abstract, not its equations, and found no
released code.

In the paper the matching decides what goes. Here scorer and budget do, and the matching where it
goes: `alternate` looks among the kept entries of the other half, which is the paper's rule where
only one half was up for rejection, `every` among all that the chunk keeps. Entries are numbered in
the order in which the cache holds them, the similarity is the cosine of cached (rotated) keys, and
of all that a head could merge the share `merged` is, the most similar first; the rest is forgotten,
as is what finds nothing. An entry weighs as many tokens as it stands for, in means and, by ln n, in
attention; whether the paper's weighs so, we do not know. Means of means are then means of tokens,
however often a cache is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import normalize

from larder.core.errors import BadParameter
from larder.core.ledger import LOG_COUNT, Ledger
from larder.core.observation import Entries, Scored
from larder.core.plan import Plan
from larder.policy.compensation._rejected import (
    Indices,
    distinct,
    heads_of,
    marked,
    merged_by_count,
    rejected,
    rows_at,
)
from larder.policy.compensation.base import Compensation

ROWS = 1 << 16  # keys that are compared at once: 32 MiB of keys of size 128
SLIP = 1e-6  # so that .28 of 25 are 7


class Halves(Enum):
    """Which kept entries of its chunk a rejected one may join: the paper's, or any."""

    ALTERNATE = "alternate"
    EVERY = "every"


@dataclass(frozen=True)
class Chelsea(Compensation):
    """Chelsea's chunked soft matching.

    Args:
        chunk: entries among which is matched.
        merged: the share of the matches of a head that are merged, in (0, 1].
        halves: whether the entries of a chunk are matched across two halves.
    """

    chunk: int = 64
    merged: float = 1.0
    halves: Halves = Halves.ALTERNATE
    ledger = Ledger(columns=(LOG_COUNT,))

    def __post_init__(self) -> None:
        if self.chunk < 2:
            raise BadParameter(f"chelsea.chunk must be at least 2, got {self.chunk}.")
        if not 0 < self.merged <= 1:
            raise BadParameter(f"chelsea.merged must be in (0, 1], got {self.merged}.")

    def settle(self, plan: Plan, entries: Entries, scored: Scored) -> Plan:
        del scored
        gone = rejected(plan, entries)
        if not len(gone):
            return plan
        likeness, nearest = self._matches(gone, plan, entries)
        matched = likeness > -math.inf
        gone, likeness, nearest = gone[matched], likeness[matched], nearest[matched]
        best = self._best(likeness, heads_of(gone, entries), len(entries.lengths))
        return merged_by_count(plan, entries, gone[best], nearest[best])

    def _matches(
        self, gone: Indices, plan: Plan, entries: Entries
    ) -> tuple[Float[Tensor, " _"], Indices]:
        """How like each rejected entry its best match is, and which; -inf where there is none."""
        stays = marked(plan, entries)
        likeness = torch.full((len(stays),), -torch.inf, device=gone.device)
        nearest = torch.zeros(len(stays), dtype=torch.int64, device=gone.device)
        firsts, ends = self._chunks(gone, entries)
        step = max(ROWS // self.chunk, 1)
        for some in range(0, len(firsts), step):
            held = firsts[some : some + step, None] + torch.arange(self.chunk, device=gone.device)
            there = held < ends[some : some + step, None]
            held = held.clamp(max=len(stays) - 1)
            cosines = _cosines(held, entries).masked_fill(
                ~self._may(there & stays[held]), -torch.inf
            )
            best = cosines.max(-1)
            likeness[held[there]] = best.values[there]
            nearest[held[there]] = held.gather(1, best.indices)[there]
        return likeness[gone], nearest[gone]

    def _chunks(self, gone: Indices, entries: Entries) -> tuple[Tensor, Tensor]:
        """Where each chunk that loses an entry begins, and where its head ends, packed."""
        lengths = torch.tensor(entries.lengths, device=gone.device)
        ends = lengths.cumsum(0)
        heads = heads_of(gone, entries)
        starts = (ends - lengths)[heads]
        firsts, _ = distinct(starts + (gone - starts) // self.chunk * self.chunk)
        return firsts, ends[heads_of(firsts, entries)]

    def _may(self, found: Bool[Tensor, "N C"]) -> Bool[Tensor, "N _ C"]:
        """Whether an entry of a chunk may join another, if it is found there."""
        if self.halves is Halves.EVERY:
            return found[:, None].expand(-1, self.chunk, -1)
        among = torch.arange(self.chunk, device=found.device)
        return found[:, None] & ((among[:, None] - among) % 2 == 1)

    def _best(self, likeness: Tensor, heads: Indices, kv_heads: int) -> Indices:
        """Which of the matches of each head are merged; of equals the first."""
        order = torch.argsort(likeness, descending=True, stable=True)
        order = order[torch.argsort(heads[order], stable=True)]
        counts = torch.bincount(heads, minlength=kv_heads)
        ranks = torch.arange(len(heads), device=heads.device) - (counts.cumsum(0) - counts)[heads]
        merged = (self.merged * counts.double() - SLIP).ceil()[heads]
        return order[ranks < merged].sort().values


def _cosines(held: Int64[Tensor, "N C"], entries: Entries) -> Float[Tensor, "N C C"]:
    """How like each other the keys of a chunk are."""
    rows = rows_at(held.flatten(), entries).view_as(held)
    keys = normalize(entries.keys[rows].float(), dim=-1)  # [N, C, D]
    return keys @ keys.transpose(1, 2)


Part = Chelsea
