"""Scores read as weights."""

from __future__ import annotations

from larder.core.types import Packed


def non_negative_weights(scores: Packed) -> Packed:
    """Numbers of 0 or more, 0 where a score is infinite.

    Scores that can be negative are no weights: the layer's lowest is then taken from all of them.
    """
    finite = scores.isfinite()
    lowest = min(float(scores[finite].min()), 0.0) if bool(finite.any()) else 0.0
    return (scores - lowest).masked_fill(~finite, 0.0)


def restore_infinities(scores: Packed, weighed: Packed) -> Packed:
    """What was weighed, with the infinite scores as they were."""
    return weighed.where(scores.isfinite(), scores)
