"""Value rule that prefers tokens of images to those of text, or the other way round.

No paper of its own: methods for models with images give the two kinds different shares of a cache.
Here they compete, under scores that one factor brings to a common scale. Images are known inside
`model.generate`; everywhere else all tokens are text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.values.base import (
    NO_SELECTION,
    Selection,
    ValueRule,
    non_negative_weights,
    restore_infinities,
)


@dataclass(frozen=True)
class ImageWeight(ValueRule):
    """Scores of image tokens times a factor; those of a text without images do not change.

    Of scores that can be negative the lowest is taken off first.

    Args:
        factor: 0 or more; above 1 image tokens are kept longer, below 1 text is.
    """

    factor: float = 2.0
    needs = frozenset({"image"})

    def __post_init__(self) -> None:
        require(
            0 <= self.factor < math.inf, "image_weight.factor", "a number, 0 or more", self.factor
        )

    def weigh(
        self, scores: Packed, observation: Observation, selection: Selection = NO_SELECTION
    ) -> Packed:
        is_image = observation.entries.column("image")
        if not is_image.any():
            return scores
        weighed = non_negative_weights(scores) * (1 + (self.factor - 1) * is_image)
        return restore_infinities(scores, weighed)


Part = ImageWeight
