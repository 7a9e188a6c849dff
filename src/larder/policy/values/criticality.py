"""Value rule by the norm of an entry's contribution to the layer output (CriticalKV).

Feng et al., "CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation Perspective"
(2025), arXiv:2502.03805: a first part of the budget (half) goes to the highest weights, the rest
to (weight + epsilon) times the L1 norm of the value behind the output projection, averaged over the
query heads of its group; the authors' epsilon is 1e-4. Weights are scores as they come: with `mean`
or `max` they are on the scale that the epsilon is meant for.

DefensiveKV (arXiv:2510.13334) takes no epsilon, the `share` that an entry's norm has in those of
its head, and as its first part the entries with the highest mean weights, until they and what stays
anyway hold `mass` of all attention. Its released code measures the mass of the window on the
tokens before it; here it is that of the window itself.

What stays anyway, such as the window, counts as part of the first part. A head whose budget is
smaller than the layer's average, under budgets that tell heads apart, takes of the first part what
fits, the earliest first. While text is generated all norms are computed at every plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.arguments import require
from larder.core.errors import BadParameter
from larder.core.observation import Observation
from larder.core.types import Packed, PackedMask
from larder.policy.values.base import (
    NO_SELECTION,
    Selection,
    ValueRule,
    non_negative_weights,
    restore_infinities,
)

ROWS = 1 << 10  # values that are projected at once


class Norms(Enum):
    """Normalization of value norms."""

    PLAIN = "plain"
    SHARE = "share"


@dataclass(frozen=True)
class Criticality(ValueRule):
    """Weights times norms of projected values, behind a first part by weights alone.

    Of scores that can be negative the lowest is taken off first.

    Args:
        epsilon: added to every weight, so that large values count where no query attends.
        first: share of a head's budget that goes to the highest scores before values count.
        mass: instead of `first`, how much of all attention the entries of the first part hold
            together with what stays anyway.
        norms: `plain`, or each as a `share` of the sum over its head.
    """

    epsilon: float = 1e-4
    first: float = 0.5
    mass: float | None = None
    norms: Norms = Norms.PLAIN
    selects = True
    needs = frozenset({"projection"})

    def __post_init__(self) -> None:
        require(
            0 <= self.epsilon < math.inf, "criticality.epsilon", "a number, 0 or more", self.epsilon
        )
        require(0 <= self.first <= 1, "criticality.first", "in [0, 1]", self.first)
        if self.mass is not None and not 0 <= self.mass <= 1:
            raise BadParameter(f"criticality.mass must be in [0, 1], got {self.mass}.")

    @property
    def wants_weights(self) -> bool:
        return self.mass is not None

    def weigh(
        self, scores: Packed, observation: Observation, selection: Selection = NO_SELECTION
    ) -> Packed:
        finite, lengths = scores.isfinite(), list(observation.entries.lengths)
        norms = [_norms(observation, head) for head in range(len(lengths))]
        if self.norms is Norms.SHARE:
            norms = _shares(norms, torch.split(finite, lengths))
        weighed = (non_negative_weights(scores) + self.epsilon) * torch.cat(norms)
        weighed = restore_infinities(scores, weighed)
        if not selection.quota:
            return weighed
        return weighed.masked_fill(self._first(scores, selection, lengths), torch.inf)

    def _first(self, scores: Packed, selection: Selection, lengths: list[int]) -> PackedMask:
        """Mask of the first part, which is chosen by weights alone."""
        stays = scores.isposinf()
        if selection.protected is not None:
            stays = stays | selection.protected
        ranks = scores if selection.weights is None else selection.weights
        chosen = torch.zeros_like(stays)
        split = [torch.split(part, lengths) for part in (ranks, stays, chosen)]
        for own, sure, out in zip(*split, strict=True):
            order = torch.argsort(own.masked_fill(sure, -torch.inf), descending=True, stable=True)
            order = order[: len(own) - int(sure.sum())]
            out[order[: self._count(own, order, sure, selection.quota)]] = True
        return chosen

    def _count(self, own: Packed, order: Tensor, sure: PackedMask, quota: int) -> int:
        """Size of the first part of a head, beside the entries that stay anyway."""
        room = max(0, quota - int(sure.sum()))
        if self.mass is None:
            return max(0, int(self.first * quota) - int(sure.sum()))
        held = float(own[sure].sum())
        return min(room, int((held + own[order].cumsum(0) < self.mass).sum()))


def _norms(observation: Observation, head: int) -> Float[Tensor, " S"]:
    """L1 norms of a head's values, projected where the projection is known."""
    values = observation.entries.head_values(head)
    if "projection" not in observation.inputs:
        return values.float().abs().sum(-1)
    group = observation.layer.group
    norms = torch.zeros(len(values), device=values.device)
    for matrix in observation.inputs["projection"][
        head * group : (head + 1) * group
    ].float():  # [D, N]
        for start in range(0, len(values), ROWS):
            rows = slice(start, start + ROWS)
            norms[rows] += (values[rows].float() @ matrix).abs().sum(-1)
    return norms / group


def _shares(norms: Sequence[Tensor], counted: Sequence[PackedMask]) -> list[Tensor]:
    """Each head's norms as parts of the sum over those that count; 0 where that is 0."""
    tiny = torch.finfo(torch.float32).tiny
    pairs = zip(norms, counted, strict=True)
    return [scores / scores[counts].sum().clamp(min=tiny) for scores, counts in pairs]


Part = Criticality
