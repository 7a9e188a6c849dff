"""Merging of an evicted entry's value into the entries that follow it, during decode (CaM).

Zhang et al., "CaM: Cache Merging for Memory-efficient LLMs Inference" (2024), ICML, PMLR
235:58840-58850. Its cache holds sinks and recent tokens; at every step of generation the oldest of
the recent ones leaves. With probability p = clamp(a / mean a of the kept entries behind it, 0, 1),
where a is the weight that the newest query gives to an entry, its value v joins the next m of
these as v / m each; keys stay as they are. What leaves while a context is read is dropped: the
released code merges one entry per step, and many that are merged at once add up to values several
times as long as any that the model has made.

A value with merged ones is evicted as the mean of all of them, so that each value is
counted once: no value grows to more than twice the length of the longest one. The released code
hands on the sum, which counts values again in every window that they pass through, and grows with
the text where attention is even.

`sampled` draws as the paper does, for each head separately; the draw depends on `seed`, on the
entry's true position and on its head, so that a run can be repeated. `expected` adds p * v / m
without a draw, which is the same on average.

Fewer than m kept entries may follow: the released code still divides by m and so loses a part, we
divide by how many there are. For language models that generate without end that code adds up the
weights of all queries, and takes the mean of the next m = 16 alone. Formula from the released code
(its abstract and code are all that we have read).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.arguments import require
from larder.core.observation import Entries, LayerScores, Phase
from larder.core.part import Ledger
from larder.core.plan import Folds, Plan, StepSpreading
from larder.core.types import empty_tensor
from larder.ops.entry_merge import spread_folds
from larder.policy.compensation._token_merge import heads_of, rejected_indices
from larder.policy.compensation.base import Compensation

NEWEST = "newest"
JOINED = "joined"  # total weight of the values merged into an entry
# Constants of the last steps of MurmurHash3 (Appleby, in the public domain), 32 bits.
_BITS = (1 << 32) - 1
_STEPS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
_APART, _SEEDED, _HEADED = 0x9E3779B9, 0x7F4A7C15, 0x94D049BB


class Merge(Enum):
    """Random merging as in the paper, or merging by the expected weight."""

    SAMPLED = "sampled"
    EXPECTED = "expected"


@dataclass(frozen=True)
class Cam(Compensation):
    """CaM's merging of values.

    Args:
        window: m, how many kept entries a value is spread over.
        merge: `sampled` at random, or `expected`, the mean over draws.
        seed: seed of the draw.
    """

    window: int = 32
    merge: Merge = Merge.SAMPLED
    seed: int = 0
    tallies = frozenset({NEWEST})
    ledger = Ledger(columns=(JOINED,))

    def __post_init__(self) -> None:
        require(self.window >= 1, "cam.window", "at least 1", self.window)

    @property
    def merges_apart(self) -> bool:
        return True

    @property
    def is_step_rule(self) -> bool:
        return True

    @property
    def step_merging(self) -> StepSpreading:
        return StepSpreading(JOINED, self.window, self.seed if self._is_sampled else None)

    @property
    def _is_sampled(self) -> bool:
        return self.merge is Merge.SAMPLED

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        if scored.phase is not Phase.DECODE:
            return plan
        rejected = rejected_indices(plan, entries)
        if not len(rejected) or not len(plan.kept):
            return plan
        drawn = empty_tensor(torch.float32, 0)
        if self._is_sampled:
            heads = heads_of(rejected, entries)
            drawn = _uniform(entries.packed_positions()[rejected], heads, self.seed)
        starts, lengths = entries.layout
        sources, targets, key_weights, value_weights = spread_folds(
            entries.columns[NEWEST],
            starts,
            lengths,
            plan.kept,
            plan.lengths,
            rejected,
            self.window,
            drawn,
        )
        folds = Folds(sources, targets, key_weights, value_weights)
        return _with_single_count(plan, entries, folds)


def _with_single_count(plan: Plan, entries: Entries, folds: Folds) -> Plan:
    """Plan with merges in which every source weighs as a single value."""
    joined = entries.column(JOINED)
    coming = folds.sources != folds.targets
    weights = folds.value_weights * coming
    total = joined.index_add(0, folds.targets, weights)
    single = weights / (1 + joined[folds.sources])
    folds = replace(folds, value_weights=torch.where(coming, single, folds.value_weights))
    return replace(plan, folds=folds, columns={**plan.columns, JOINED: total[plan.kept]})


def _uniform(
    positions: Int[Tensor, " F"], heads: Int[Tensor, " F"], seed: int
) -> Float[Tensor, " F"]:
    """Uniform number in [0, 1) per entry, the same on every machine."""
    mixed = (positions.long() + 1) * _APART + heads.long() * _HEADED
    mixed = (mixed + (seed * _SEEDED & _BITS)) & _BITS
    for shift, factor in _STEPS:
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _BITS
    return mixed.double() / (_BITS + 1)


Part = Cam
