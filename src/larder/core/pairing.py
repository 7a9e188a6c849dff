"""Which layers hold entries together, and how alike these must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from larder.core.errors import BadParameter
from larder.core.spec import LayerSpec


@dataclass(frozen=True)
class LayerPairing:
    """From some depth on, two layers after each other share the directions of their entries.

    Args:
        start: share of the layers, counted from the first, that stay by themselves.
        weight: of the upper layer's direction in the shared one, in [0, 1].
        apart: entries whose directions differ most are not shared: those in this upper part of
            the range of their angles.
    """

    start: float = 0.5
    weight: float = 0.6
    apart: float = 0.05

    def __post_init__(self) -> None:
        for name in ("start", "weight", "apart"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadParameter(
                    f"minicache.{name} must be in [0, 1], got {getattr(self, name)}."
                )

    def pairs(self, layers: Sequence[LayerSpec]) -> list[tuple[int, int]]:
        """Indices of the layers that share, lower and upper; heads must be alike.

        Args:
            layers: those that the budget governs.
        """
        deep = layers[int(self.start * len(layers)) :]
        return [
            (lower.index, upper.index)
            for lower, upper in zip(deep[::2], deep[1::2], strict=False)
            if (lower.kv_heads, lower.head_dim) == (upper.kv_heads, upper.head_dim)
        ]
