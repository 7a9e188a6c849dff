"""Fit of a plan to its bytes: tiers by importance, and one step for all layers of a cache.

Bytes fall as the step grows, so the secant method within the bounds of a bisection finds the
smallest step whose bytes fit. Components of the first layers are held meanwhile, up to
`HELD_BYTES`; those of the others are computed anew for every step, one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from larder.cache.transformed_tier import ComponentBatch, TransformedTier
from larder.core.codec import LAST_TIER
from larder.core.errors import BudgetError

TRIES = 24
HELD_BYTES = 1 << 26
SLACK = 0.004  # octaves of the bytes that may be left
FIRST_SLOPE, FLATTEST = 0.4, 0.05  # octaves of bytes lost with one of the step
FINEST, COARSEST = 2.0**-20, 2.0**20  # steps
OCTAVES_PER_TIER = 2.0  # of importance


@dataclass(frozen=True)
class FitLayer:
    """Layer of a plan that is fitted.

    Args:
        tier: entries that are coded already, if any.
        batch: makes the components of the entries to code.
        exact_bytes: of the entries that stay exact.
        column_bytes: of the ledger columns of the entries to code.
        allowed_bytes: of all kept entries.
    """

    tier: TransformedTier
    batch: Callable[[], ComponentBatch]
    exact_bytes: int
    column_bytes: int
    allowed_bytes: int


def tiers_of(importance: Float[Tensor, " N"], median: Float[Tensor, ""]) -> Int8[Tensor, " N"]:
    """Tier of each entry: a step half as long for four times the median's importance.

    Args:
        importance: binary logarithms; -inf for no importance.
        median: of all layers; entries are alike where it is not finite: most scores are 0, or
            those of a layer are no weights (NaN).
    """
    if not math.isfinite(float(median)):
        return torch.zeros(len(importance), dtype=torch.int8)
    tiers = -((importance - median) / OCTAVES_PER_TIER).round()
    return tiers.clamp(-LAST_TIER, LAST_TIER).to(torch.int8)


def common_step(layers: Sequence[FitLayer]) -> float:
    """Smallest step, within a tolerance, with which all layers together fit their bytes.

    Raises:
        BudgetError: not even the coarsest step fits.
    """
    layers = _with_held_components(layers)
    fixed = sum(layer.exact_bytes + layer.column_bytes for layer in layers)
    allowed = sum(layer.allowed_bytes for layer in layers) - fixed
    least = max((layer.tier.step for layer in layers), default=0.0) or FINEST
    low, high = math.log2(least), math.log2(COARSEST)
    if allowed <= 0:
        raise _too_little(layers, fixed, allowed)
    if _bytes(layers, least) <= allowed:
        return least
    tried = low if least > FINEST else -2.0
    step, slope, last = COARSEST, -FIRST_SLOPE, (math.nan, math.nan)
    for turn in range(TRIES):
        found = math.log2(_bytes(layers, 2.0**tried) / allowed)
        if found <= 0:
            step, high = 2.0**tried, tried
            if found >= -SLACK:
                break
        else:
            low = tried
        if tried != last[0] and math.isfinite(last[0]):
            slope = min((found - last[1]) / (tried - last[0]), -FLATTEST)
        last = tried, found
        guess = tried - (found + SLACK / 2) / slope if turn < TRIES // 2 else math.inf
        tried = guess if low < guess < high else (low + high) / 2
    if step == COARSEST and _bytes(layers, step) > allowed:
        raise _too_little(layers, fixed, allowed)
    return step


def _too_little(layers: Sequence[FitLayer], fixed: int, allowed: int) -> BudgetError:
    fewest = fixed + math.ceil(_bytes(layers, COARSEST))
    return BudgetError(
        f"The entries that transform keeps take at least {fewest} bytes, but the budget allows "
        f"{fixed + allowed}: raise the budget, lower sinks or recent, or choose parts with fewer "
        "ledger columns."
    )


def _with_held_components(layers: Sequence[FitLayer]) -> list[FitLayer]:
    """Layers of which the first ones keep their components."""
    left, found = HELD_BYTES, list[FitLayer]()
    for layer in layers:
        if left > 0:
            batch = layer.batch()
            left -= batch.components.nbytes
            layer = replace(layer, batch=partial(_same, batch))  # noqa: PLW2901
        found.append(layer)
    return found


def _same(batch: ComponentBatch) -> ComponentBatch:
    return batch


def _bytes(layers: Sequence[FitLayer], step: float) -> float:
    return sum(layer.tier.estimate(layer.batch(), step) for layer in layers)
