"""Fit of a plan to its bytes: tiers by importance, and one step for all layers of a cache.

Bytes fall as the step grows, so the secant method within the bounds of a bisection finds the
smallest step whose bytes fit. Components of the first layers are held meanwhile, up to
`HELD_BYTES`; those of the others are computed again for every step, one layer at a time, so the
first step that they are asked for is the one with which the held ones fit their share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from larder.cache.component_means import CenteredBlocks
from larder.cache.transformed_tier import TransformedTier
from larder.core.codec import LAST_TIER
from larder.core.errors import BudgetError

TRIES = 24
HELD_BYTES = 1 << 26
SLACK = 0.004  # octaves of the bytes that may be left
FIRST_STEP = 0.25
FIRST_SLOPE, FLATTEST = 0.4, 0.05  # octaves of bytes lost with one of the step
FINEST, COARSEST = 2.0**-20, 2.0**20  # steps
OCTAVES_PER_TIER = 2.0  # of importance


@dataclass(frozen=True)
class FitLayer:
    """Layer of a plan that is fitted.

    Args:
        tier: entries that are coded already, if any.
        centered: makes the blocks of the entries to code, for a step.
        exact_bytes: of the entries that stay exact.
        column_bytes: of the ledger columns of the entries to code.
        allowed_bytes: of all kept entries.
        entries: to code.
    """

    tier: TransformedTier
    centered: Callable[[float], CenteredBlocks]
    exact_bytes: int
    column_bytes: int
    allowed_bytes: int
    entries: int


@dataclass(frozen=True)
class StepGuess:
    """Step, and the octaves of bytes that one octave of it adds."""

    step: float
    slope: float


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
    held, others = _with_held_components(layers)
    layers = [*held, *others]
    fixed = sum(layer.exact_bytes + layer.column_bytes for layer in layers)
    allowed = float(sum(layer.allowed_bytes for layer in layers) - fixed)
    least = max((layer.tier.step for layer in layers), default=0.0) or FINEST
    if allowed <= 0:
        raise _too_little(layers, fixed, allowed)
    first = StepGuess(least if least > FINEST else FIRST_STEP, -FIRST_SLOPE)
    if others and least == FINEST:
        share = sum(layer.entries for layer in held) / sum(layer.entries for layer in layers)
        first = _search(partial(_bytes, held), share * allowed, least, first)
    step = _search(partial(_bytes, layers), allowed, least, first).step
    if step == COARSEST and _bytes(layers, step) > allowed:
        raise _too_little(layers, fixed, allowed)
    return step


def _search(
    size: Callable[[float], float], allowed: float, least: float, first: StepGuess
) -> StepGuess:
    """Smallest step, from `least` on, whose bytes fit; the coarsest one where none does.

    Args:
        size: bytes with a step.
        first: step that is tried first.
    """
    low, high = math.log2(least), math.log2(COARSEST)
    step, slope, last = COARSEST, first.slope, (math.nan, math.nan)
    tried = math.log2(first.step)
    for turn in range(TRIES):
        found = math.log2(size(least if tried == low else 2.0**tried) / allowed)
        if found <= 0:
            if not turn and (tried == low or size(least) <= allowed):
                return StepGuess(least, slope)
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
    return StepGuess(step, slope)


def _too_little(layers: Sequence[FitLayer], fixed: int, allowed: float) -> BudgetError:
    fewest, most = fixed + math.ceil(_bytes(layers, COARSEST)), fixed + round(allowed)
    return BudgetError(
        f"The entries that transform keeps take at least {fewest} bytes, but the budget allows "
        f"{most}: raise the budget, lower sinks or recent, or choose parts with fewer ledger "
        "columns."
    )


def _with_held_components(layers: Sequence[FitLayer]) -> tuple[list[FitLayer], list[FitLayer]]:
    """First layers, which keep their components, and the others."""
    left, held = HELD_BYTES, list[FitLayer]()
    for layer in layers:
        if left <= 0:
            break
        own = layer.centered(math.nan)
        left -= own.held_bytes
        held.append(replace(layer, centered=partial(_held, layer, own)))
    return held, list(layers[len(held) :])


def _held(layer: FitLayer, own: CenteredBlocks, step: float) -> CenteredBlocks:
    """Held components; those of the step that the tier has are centered on its own means."""
    return layer.centered(step) if step == layer.tier.step else own


def _bytes(layers: Sequence[FitLayer], step: float) -> float:
    return sum(layer.tier.estimate(layer.centered(step), step) for layer in layers)
