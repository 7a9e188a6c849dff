"""Slots that learned convolutions mix from what is rejected and what they were (LoCoCo).

Cai, Tian, Wang, Chen, "LoCoCo: Dropping In Convolutions for Long Context Compression" (2024),
arXiv:2406.05317. Of the kept entries of a head those with the lowest scores, protected ones apart,
become slots. One convolution per layer reads the keys and values of slots and rejected entries,
in the order of their positions, and a softmax over them gives each slot a weight of every one of
them. A slot becomes gamma times the entry of these weights, and 1 - gamma times itself, keys and
values alike; with gamma 0 everything is as with `drop()`. `larder train lococo` trains convolution
and gamma. Keys are mixed as they are cached, rotated, as in the released code.

What differs: at most half of a head's kept entries are slots, and no more than there are channels;
a head with fewer slots uses the first channels. Entries that are rejected while text is generated
are dropped: the released code waits for a block of them. Rows of merges are as many as slots times
entries, so long texts are read by `blockwise()`, as there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from larder.core.errors import ScoreError
from larder.core.observation import Entries, LayerScores, Phase
from larder.core.plan import Folds, Plan
from larder.policy.compensation._token_merge import Indices, kept_mask, rejected_rows
from larder.policy.compensation.base import Compensation

LOCOCO = "lococo"
SLOT_SHARE = 0.5  # of a head's kept entries, at most


@dataclass(frozen=True)
class Lococo(Compensation):
    """LoCoCo's slots."""

    needs = frozenset({LOCOCO})

    def compensate(self, plan: Plan, entries: Entries, scored: LayerScores) -> Plan:
        names = ("kernel", "bias", "gamma")
        missing = [name for name in names if f"{LOCOCO}.{name}" not in scored.learned]
        if missing:
            raise ScoreError("lococo() was given no convolution: plan through a model's runtime.")
        tensors = {name: scored.learned[f"{LOCOCO}.{name}"] for name in names}
        if scored.phase is Phase.DECODE or not float(tensors["gamma"]):
            return plan
        parts = [
            _head_folds(entries, *head, tensors)
            for head in _heads(plan, entries, scored, len(tensors["bias"]))
        ]
        if not parts:
            return plan
        sources, targets, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        return replace(plan, folds=Folds(sources, targets, weights, weights))


def _heads(
    plan: Plan, entries: Entries, scored: LayerScores, most: int
) -> list[tuple[Indices, Indices]]:
    """Slots and rejected entries of each head that has both, packed and ascending."""
    stays, found, first = kept_mask(plan, entries), list[tuple[Indices, Indices]](), 0
    for held, kept in zip(entries.lengths, plan.lengths, strict=True):
        rows = torch.arange(first, first + held, device=stays.device)
        free = rows[stays[rows] & ~scored.protected[rows]]
        count = min(most, math.floor(SLOT_SHARE * kept), len(free))
        if count and held > kept:
            lowest = scored.scores[free].argsort(stable=True)[:count]
            found.append((free[lowest].sort().values, rows[~stays[rows]]))  # pyright: ignore
        first += held
    return found


def _head_folds(
    entries: Entries, slots: Indices, rejected: Indices, tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, targets and weights of the slots of a head."""
    others = torch.cat([slots, rejected]).sort().values  # pyright: ignore
    rows = rejected_rows(others, entries)
    chosen = torch.searchsorted(others, slots)
    given = entries.keys[rows].float()[None], entries.values[rows].float()[None]
    weights = slot_weights(*given, chosen[None], **tensors)[0]
    count, width = weights.shape
    return others.repeat(count), slots.repeat_interleave(width), weights.flatten()


Part = Lococo


def slot_weights(
    keys: Float[Tensor, "K N D"],
    values: Float[Tensor, "K N D"],
    chosen: Int64[Tensor, "K S"],
    kernel: Float[Tensor, "most E taps"],
    bias: Float[Tensor, " most"],
    gamma: Float[Tensor, ""],
) -> Float[Tensor, "K S N"]:
    """Weight of every entry in each slot: gamma of a softmax over entries, the rest of one of them.

    Args:
        keys, values: neighbors by order; the convolution reads both side by side.
        chosen: entry that each slot was, ascending.
        kernel, bias: a channel for each slot, of which the first are used.
    """
    count = chosen.shape[1]
    inputs = torch.cat([keys, values], 2).transpose(1, 2).to(kernel.dtype)  # [K, E, N]
    shares = F.conv1d(inputs, kernel[:count], bias[:count], padding="same").softmax(-1)
    own = F.one_hot(chosen, keys.shape[1]).to(shares.dtype)
    return own + gamma * (shares - own)
