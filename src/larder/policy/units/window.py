"""Windows of tokens, kept or evicted together by their highest scores (WindowKV).

Zuo et al., "WindowKV: Task-Adaptive Group-Wise KV Cache Window Selection for Efficient LLM
Inference" (2025), arXiv:2503.17922. A window's score depends on the task: where something must be
located it is the mean of the higher half of its scores, where much must be gathered the mean of
all. A trained classifier that reads the ends of the text picks one of them there; here a rule does
(`task="found"`): something is located where one of the last tokens that were read has a question
mark. `task="given"` takes `best` as it is. Windows of 8 tokens are those of the released code.
Differences: budgets count entries, so the last window that fits may stay in part; for gathering the
code also observes half as many queries, which no unit decides. The code joins all heads
(`layer_mean`), and reuses windows over groups of layers, as `layers` does where they hold the same
positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from larder.core.arguments import require
from larder.core.observation import Observation
from larder.core.types import Packed
from larder.policy.units.base import Unit, pool_spans

MARKS = "question_marks"
LAST = 32  # tokens that are looked at for a question
EVEN = 1e-9  # 100 * 0.29 is a little less than 29


class Task(Enum):
    """Source of the task, to locate or to gather: `best`, or the end of the text."""

    GIVEN = "given"
    FOUND = "found"


@dataclass(frozen=True)
class Window(Unit):
    """Mean of a window's highest scores. Windows are cut by true position.

    Args:
        size: positions in a window.
        best: the share of `size` that is averaged, in (0, 1]; at least one score. 0.5 to locate, 1
            to gather.
        layers: consecutive layers that share the scores of the first of them.
        task: `given`, or `found`: all scores are averaged unless the text ends with a question;
            refused where plans are made between blocks, which end anywhere.
    """

    size: int = 8
    best: float = 0.5
    layers: int = 1
    task: Task = Task.GIVEN

    def __post_init__(self) -> None:
        require(self.size >= 1, "window.size", "at least 1 token", self.size)
        require(0 < self.best <= 1, "window.best", "a fraction in (0, 1]", self.best)
        require(self.layers >= 1, "window.layers", "at least 1", self.layers)

    @property
    def layers_together(self) -> int:
        return self.layers

    @property
    def needs_whole_text(self) -> bool:
        return self.task is Task.FOUND

    def required_providers(self) -> frozenset[str]:
        return frozenset({MARKS}) if self.task is Task.FOUND else frozenset()

    def pool(self, scores: Packed, observation: Observation) -> Packed:
        share = self.best if self.task is Task.GIVEN or _asks(observation) else 1.0
        return pool_spans(
            scores, observation.entries, self.size, max(1, int(self.size * share + EVEN))
        )


def _asks(observation: Observation) -> bool:
    """True if one of the last tokens has a question mark."""
    return not observation.lexicon.get(MARKS, frozenset()).isdisjoint(observation.ids[-LAST:])


Part = Window
