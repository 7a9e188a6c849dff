"""Fit of a plan to its bytes: tiers by importance, and one step for all layers of a cache.

Bytes fall as the step grows, so bisection finds the smallest step whose bytes fit. Components are
computed anew for every step that is tried, layer by layer, so that one layer's are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from larder.cache.transform_tables import TransformTables
from larder.cache.transformed_tier import ComponentBatch, TransformedTier
from larder.core.codec import LAST_TIER, TransformSpec

TRIES = 24
SLACK = 0.002  # share of the bytes that may be left
FINEST, COARSEST = 2.0**-20, 2.0**20  # steps
OCTAVES_PER_TIER = 2.0  # of importance


@dataclass(frozen=True)
class FitLayer:
    """Layer of a plan that is fitted.

    Args:
        batch: makes the components of the entries to code.
        exact_bytes: of the entries that stay exact.
        allowed_bytes: of all kept entries.
        least_step: step of entries that are coded already; 0 without any.
    """

    spec: TransformSpec
    tables: TransformTables
    batch: Callable[[], ComponentBatch]
    exact_bytes: int
    allowed_bytes: int
    least_step: float


def tiers_of(importance: Float[Tensor, " N"], median: Float[Tensor, ""]) -> Int8[Tensor, " N"]:
    """Tier of each entry: a step half as long for four times the median's importance.

    Args:
        importance: binary logarithms; -inf for no importance.
    """
    if not math.isfinite(float(median)):
        return torch.zeros(len(importance), dtype=torch.int8)
    tiers = -((importance - median) / OCTAVES_PER_TIER).round()
    return tiers.clamp(-LAST_TIER, LAST_TIER).to(torch.int8)


def common_step(layers: Sequence[FitLayer]) -> float:
    """Smallest step, within a tolerance, with which all layers together fit their bytes.

    The coarsest one if nothing fits: then the exact entries alone take the bytes.
    """
    allowed = sum(layer.allowed_bytes - layer.exact_bytes for layer in layers)
    least = max((layer.least_step for layer in layers), default=0.0) or FINEST
    low, high = math.log2(least), math.log2(COARSEST)
    if allowed <= 0:
        return COARSEST
    if _bytes(layers, least) <= allowed:
        return least
    tried = low if least > FINEST else -2.0
    step = COARSEST
    for turn in range(TRIES):
        found = _bytes(layers, 2.0**tried)
        if found <= allowed:
            step, high = 2.0**tried, tried
            if found >= (1 - SLACK) * allowed:
                break
        else:
            low = tried
        tried = _next_try(tried, found / allowed, low, high, turn)
    return step


def _next_try(tried: float, excess: float, low: float, high: float, turn: int) -> float:
    """Next step in octaves: along the usual slope first, then by bisection."""
    guess = tried + 3.0 * (excess - 1 + SLACK / 2) if turn < TRIES // 2 else math.inf
    margin = (high - low) * 1e-3
    return guess if low + margin < guess < high - margin else (low + high) / 2


def _bytes(layers: Sequence[FitLayer], step: float) -> float:
    return sum(
        TransformedTier.estimate(layer.spec, layer.tables, step, layer.batch()) for layer in layers
    )
