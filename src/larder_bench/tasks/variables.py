"""Variables that refer to each other: the value of the last one is that of the first.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.2 (variable tracking). RULER asks for all variables of a value;
in the bundled models' wording the value of the last variable of each chain is asked for, so that
every answer is one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from larder.core import BadParameter, Conversation
from larder_bench.datasets.grammar import Grammar
from larder_bench.datasets.haystack import (
    Haystack,
    HaystackText,
    Needle,
    draw_distinct,
    variable_chain,
)
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import Wording
from larder_bench.tasks.base import BenchTask


@dataclass(frozen=True)
class Variables(BenchTask):
    """Chains of variables in a haystack.

    Args:
        chains: number of chains, each with a question of its own.
        hops: references from the last variable of a chain to the first.
        hay: source of the haystack.
    """

    chains: int = 4
    hops: int = 2
    hay: Haystack = Haystack.TALK

    def __post_init__(self) -> None:
        if self.chains < 1:
            raise BadParameter(f"variables.chains must be 1 or more, got {self.chains}.")
        if self.hops < 0:
            raise BadParameter(f"variables.hops must be 0 or more, got {self.hops}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random = Random(seed)
        asks_names = sources.wording is not Wording.SEED

        def draw(grammar: Grammar, random: Random) -> Needle:
            return variable_chain(random, self.hops + 1, asks_names)

        drawn = draw_distinct(draw, sources.grammar, random, self.chains)
        haystack = HaystackText.of(sources, self.hay, random, tokens)
        return haystack.conversation(f"variables-{tokens}-{seed}", "niah_vars", drawn)


Part = Variables
