"""Add the values of what is rejected to the kept entries that follow it.

Zhang et al., "CaM: Cache Merging for Memory-efficient LLMs Inference" (2024), ICML, PMLR
235:58840-58850. A rejected value v joins the next m kept entries of its head as
v / m each, with probability p = clamp(S / mean S of these entries, 0, 1), where S is the attention
that an entry has received; keys stay as they are. Formula from the released code (its abstract and
code are all that we have read).

`expected` adds p * v / m without a draw. Where p is not clamped this gives back, to queries that
look at entries as they were looked at so far, exactly what the head's weighted sum of values loses:
sum over j of S_j * (S / mean S) * v / m = S * v. `sampled` draws as the paper does, and is that on
average only; a token's luck depends on `seed` and on its true position, and heads share it, so that
a run can be repeated.

Fewer than m kept entries may follow: the released code still divides by m and so loses a part, we
divide by how many there are. S is the accumulated attention (its streaming code; its other code
takes the last query's), and its mean is over the entries that are merged into. The released code
merges one entry at each step of generation, and for some models takes p > 1 for the draw; we merge
whatever a plan rejects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from jaxtyping import Float, Int
from torch import Tensor

from larder.core.errors import BadParameter
from larder.core.nothing import nothing
from larder.core.observation import Entries, Scored
from larder.core.plan import Folds, Plan
from larder.ops.folding import spread_folds
from larder.policy.compensation._rejected import rejected
from larder.policy.compensation.base import Compensation

MASS = "mass"
# Constants of the last steps of MurmurHash3 (Appleby, in the public domain), 32 bits.
_BITS = (1 << 32) - 1
_STEPS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
_APART, _SEEDED = 0x9E3779B9, 0x7F4A7C15


class Merge(Enum):
    """Whether a value joins by chance, as in the paper, or by the share that it has on average."""

    EXPECTED = "expected"
    SAMPLED = "sampled"


@dataclass(frozen=True)
class Cam(Compensation):
    """CaM's merging of values.

    Args:
        window: m, how many kept entries a rejected value is spread over.
        merge: by chance, or by what chance gives on average.
        seed: another seed is another draw.
    """

    window: int = 32
    merge: Merge = Merge.EXPECTED
    seed: int = 0
    tallies = frozenset({MASS})

    def __post_init__(self) -> None:
        if self.window < 1:
            raise BadParameter(f"cam.window must be at least 1, got {self.window}.")

    def settle(self, plan: Plan, entries: Entries, scored: Scored) -> Plan:
        del scored
        gone = rejected(plan, entries)
        if not len(gone) or not len(plan.kept):
            return plan
        drawn = nothing(torch.float32, 0)
        if self.merge is Merge.SAMPLED:
            drawn = _uniform(entries.packed_positions()[gone], self.seed)
        told = plan.kept, plan.lengths, gone, self.window, drawn
        return replace(
            plan, folds=Folds(*spread_folds(entries.columns[MASS], *entries.layout, *told))
        )


def _uniform(positions: Int[Tensor, " F"], seed: int) -> Float[Tensor, " F"]:
    """A number in [0, 1) per position, the same on every machine."""
    mixed = ((positions.long() + 1) * _APART + (seed * _SEEDED & _BITS)) & _BITS
    for shift, factor in _STEPS:
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _BITS
    return mixed.double() / (_BITS + 1)


Part = Cam
