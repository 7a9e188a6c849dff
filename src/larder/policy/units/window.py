"""Windows of tokens, kept or evicted together by their highest scores (WindowKV).

Zuo et al., "WindowKV: Task-Adaptive Group-Wise KV Cache Window Selection for Efficient LLM
Inference" (2025), arXiv:2503.17922. A window's score depends on the task: where something must be
located it is the mean of the higher half of its scores, where much must be gathered the mean of
all. A trained classifier picks one of them there; here `best` does, and the default is the first.
Windows of 8 tokens are those of the released code. Differences: budgets count entries, so the last
window that fits may stay in part; the code joins all heads (`layer_mean`), and reuses windows over
groups of layers, which `layers` does where they hold the same positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from larder.core.errors import BadParameter
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.units.base import Unit, pool_spans

EVEN = 1e-9  # 100 * 0.29 is a little less than 29


@dataclass(frozen=True)
class Window(Unit):
    """Mean of a window's highest scores. Windows are cut by true position.

    Args:
        size: positions in a window.
        best: the share of `size` that is averaged, in (0, 1]; at least one score. 0.5 to locate, 1
            to gather.
        layers: consecutive layers that share the scores of the first of them.
    """

    size: int = 8
    best: float = 0.5
    layers: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise BadParameter(f"window.size must be at least 1 token, got {self.size}.")
        if not 0 < self.best <= 1:
            raise BadParameter(f"window.best must be a fraction in (0, 1], got {self.best}.")
        if self.layers < 1:
            raise BadParameter(f"window.layers must be at least 1, got {self.layers}.")

    @property
    def layers_together(self) -> int:
        return self.layers

    def pool(self, scores: Packed, seen: Observation) -> Packed:
        return pool_spans(
            scores, seen.entries, self.size, max(1, int(self.size * self.best + EVEN))
        )


Part = Window
