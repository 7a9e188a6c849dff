"""Logarithm of scores that may be 0."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

LEAST = 1e-8  # scores below are next to nothing


def log_labels(labels: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """Natural logarithm, bounded below."""
    return labels.clamp(min=LEAST).log()
