"""Many turns: the questions of another task, asked one after the other in one sitting.

Yucheng Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (2024),
arXiv:2412.10319, section 3 (multi-turn mode). What a cache dropped because the first question did
not need it is missing at the later ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from larder.bench.sources import Sources
from larder.bench.task import Sitting, Style, Task, shared_task
from larder.core.conversation import Conversation


@dataclass(frozen=True)
class Turns(Task):
    """One sitting.

    Args:
        of: the task whose conversations and questions are taken, as it is written.
    """

    style: ClassVar[Style] = Style.TURNS
    of: str = "lifelog(questions=5)"

    def __post_init__(self) -> None:
        shared_task("turns", self.of)

    def make(self, seed: int, tokens: int, sources: Sources) -> Conversation:
        made = shared_task("turns", self.of).make(seed, tokens, sources)
        return replace(made, name=f"turns-{tokens}-{seed}")

    def sittings(self, questions: Sitting) -> tuple[Sitting, ...]:
        return (questions,)


Part = Turns
