"""Ladder-shaped cache: layers keep different old tokens, so that together they reach further back
(LaCache).

Shi et al., "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large Language
Models" (2025), arXiv:2507.14204, section 3. Entries that are not protected are slots, cut into
rungs. Of each rung a layer keeps a run of slots that lies later the deeper the layer: a token is
kept by `span` layers in succession, of which `overlap` keep the next one too. Rungs are climbed
from the oldest on, only as many as room is needed for; at the end it begins again at the oldest,
with what earlier rounds left, so that the past grows sparser with its age.

With L layers a rung has 1 + ceil((L - span) / (span - overlap)) slots, of which each layer keeps
ceil(span / (span - overlap)): numbers of the released code; which layer keeps which slots is our
reading of the paper's words. `variant="code"` is the released code, where layer i keeps those from
slot i mod (lost + 1) on, so that it is not layers in succession that keep a token. There a rung
loses its slots all at once, and the budget is raised by half of them so as to be met on average;
here it loses them one by one, the oldest first, so that the budget is met at every step. There as
many recent tokens as layers are left alone; here those that the policy protects. Where a rung would
keep all of itself, or where there is no room for one, the oldest slots go. Scores are not looked
at: one by positions alone costs least.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from larder.core.errors import BadParameter
from larder.core.observation import LayerScores, ScoredLayers
from larder.core.part import Ledger
from larder.core.plan import LayerPlans, LayerQuotas, Plan
from larder.core.types import Variant
from larder.policy.budgets.base import Budget

Marks = Bool[np.ndarray[Any, Any], " S"]

# Slots before the rung that is next, and how many of its own are gone already.
DONE, GONE = "ladder_done", "ladder_gone"


@dataclass(frozen=True)
class Ladder(Budget):
    """Equal budgets, with the kept positions chosen by layer.

    Args:
        tokens: entries per kv head.
        span: layers in succession that keep a token; a whole number is layers, a fraction in
            (0, 1) is that share of them, rounded up.
        overlap: of these, how many also keep the next one; fewer than `span`.
        variant: `larder` and `paper` climb from shallow to deep, `code` starts again every few
            layers.
    """

    span: int | float = 0.5
    overlap: int | float = 0
    variant: Variant = Variant.LARDER

    ledger = Ledger(scalars=(DONE, GONE))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.span > 0 or (isinstance(self.span, float) and self.span >= 1):
            raise BadParameter(
                f"ladder.span must be layers (1 or more) or a fraction in (0, 1), got {self.span}."
            )
        if not self.overlap >= 0 or (isinstance(self.overlap, float) and self.overlap >= 1):
            raise BadParameter(
                "ladder.overlap must be layers (0 or more) or a fraction in [0, 1), "
                f"got {self.overlap}."
            )
        if isinstance(self.span, float) is isinstance(self.overlap, float) and not (
            self.overlap < self.span
        ):
            raise BadParameter(
                f"ladder.overlap must be below span={self.span}, got {self.overlap}."
            )

    def choose(self, ready: ScoredLayers, quotas: LayerQuotas) -> LayerPlans:
        order = sorted(quotas)
        return {
            index: self._of_layer(scored, quotas[index], order.index(index), len(order))
            for index, scored in ready.items()
        }

    def _of_layer(self, scored: LayerScores, quota: int, layer: int, layers: int) -> Plan:
        rung, device = self._rung(layer, layers), scored.scores.device
        cuts = np.cumsum(scored.lengths)[:-1]
        heads = np.split(scored.protected.cpu().numpy(), cuts)
        marks: list[Marks] = []
        states = _head_progress(scored)
        after: list[tuple[int, int]] = []
        for head, (protected, state) in enumerate(zip(heads, states, strict=True)):
            if head and state == states[head - 1] and np.array_equal(protected, heads[head - 1]):
                marks.append(marks[-1])
                after.append(after[-1])
                continue
            done, gone = state
            mark, new = rung.retain(protected, len(protected) - quota, done, gone)
            marks.append(mark)
            after.append(new)
        numbers = scored.scores.new_tensor(after).T
        mask = torch.from_numpy(np.concatenate(marks))  # pyright: ignore
        plan = Plan.from_mask(mask.to(device), scored.lengths)
        return replace(plan, scalars={DONE: numbers[0], GONE: numbers[1]})

    def _rung(self, layer: int, layers: int) -> Rung:
        span = min(_layers(self.span, layers), layers)
        step = span - min(_layers(self.overlap, layers), span - 1)
        slots = 1 + math.ceil((layers - span) / step)
        stays = min(math.ceil(span / step), slots)
        if self.variant is Variant.CODE:
            return Rung(slots, stays, layer % (slots - stays + 1))
        earliest = math.ceil((layer - span + 1) / step)
        return Rung(slots, stays, min(max(earliest, 0), slots - stays))


@dataclass(frozen=True)
class Rung:
    """Rung of the ladder: slots that are processed together.

    Args:
        slots: how many.
        stays: how many of them one layer keeps.
        first: the first of those.
    """

    slots: int
    stays: int
    first: int

    def retain(
        self, protected: Marks, excess: int, done: int, gone: int
    ) -> tuple[Marks, tuple[int, int]]:
        """Mask of the entries of a head that stay when `excess` are evicted, and the new
        progress.
        """
        free = np.flatnonzero(~protected)
        spared = max(excess - len(free), 0)  # more is protected than there is room for
        lost, state = self.evict(len(free), excess - spared, done, gone)
        mark = np.ones(len(protected), np.bool_)
        mark[free[lost]] = False
        if spared:
            mark[np.flatnonzero(mark)[len(protected) - excess :]] = False
        return mark, state

    def evict(
        self, held: int, excess: int, done: int, gone: int
    ) -> tuple[list[int], tuple[int, int]]:
        """Evicted slots, and the new progress.

        Args:
            held: slots.
            excess: how many have to go; below 1 none.
            done: slots before the rung that is next.
            gone: slots of it that it has lost already.
        """
        lost = list[int]()
        spare = self.slots - self.stays
        for left in range(held, held - excess, -1):
            if done + self.slots - gone > left:
                done, gone = 0, 0
            if not spare or self.slots > left and not gone:
                _evict_slot(0, lost)
                continue
            _evict_slot(done if gone < self.first else done + self.stays, lost)
            gone += 1
            if gone == spare:
                done, gone = done + self.stays, 0
        return lost, (done, gone)


def _evict_slot(index: int, lost: list[int]) -> None:
    """Add the slot that is number `index` among those that are not lost; these ascend."""
    before = bisect_right(range(len(lost)), index, key=lambda number: lost[number] - number)
    lost.insert(before, index + before)


def _layers(count: int | float, layers: int) -> int:
    return math.ceil(count * layers) if isinstance(count, float) else count


def _head_progress(scored: LayerScores) -> list[tuple[int, int]]:
    """Progress of each head on the ladder; (0, 0) for a head that was never cut."""
    heads = len(scored.lengths)
    if DONE not in scored.scalars:
        return [(0, 0)] * heads
    done, gone = (scored.scalars[name].nan_to_num(0.0).cpu().numpy() for name in (DONE, GONE))
    return [(int(done[head]), int(gone[head])) for head in range(heads)]


Part = Ladder
