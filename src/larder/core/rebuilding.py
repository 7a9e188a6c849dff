"""What stands for tokens whose keys and values are not held, and gives them back exactly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from larder.core.errors import BadParameter


class RecomputeSource(Enum):
    """What stands for a token whose keys and values are not held.

    EVERY: a residual per layer; projected.
    ONE: one residual, and the entries of the layers before it; read again from there.
    IDS: its token id; read again from the start.
    """

    EVERY = "every"
    ONE = "one"
    IDS = "ids"


@dataclass(frozen=True)
class RecomputeSpec:
    """How rejected entries come back.

    Args:
        manner: what stands for them.
        layer: before which the one residual is, where there is one.

    Raises:
        BadParameter: before the first layer stand the ids.
    """

    manner: RecomputeSource = RecomputeSource.EVERY
    layer: int = 1

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise BadParameter(
                f"recompute.depth must be at least 1, got {self.layer}: before layer 0 the token "
                "ids say as much, take held='ids'."
            )

    @property
    def depth(self) -> int:
        """How many layers hold all of their entries."""
        return self.layer if self.manner is RecomputeSource.ONE else 0

    @property
    def rereads(self) -> bool:
        """Whether tokens are read again, all of them in order."""
        return self.manner is not RecomputeSource.EVERY

    def told(self) -> str:
        """All of it as text."""
        return f"{self.manner.value} {self.layer}"

    @staticmethod
    def of(text: str) -> RecomputeSpec:
        """What `told` gave."""
        manner, layer = text.split()
        return RecomputeSpec(RecomputeSource(manner), int(layer))
