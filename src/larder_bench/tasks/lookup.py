"""Look-up: lines of a name and its value, and questions for some of the names.

Yucheng Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (2024),
arXiv:2412.10319, section 3 (Retr.KV). Names are invented and values short codes instead of the
paper's UUIDs in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from larder.core.conversation import Conversation, Question
from larder.core.errors import BadParameter
from larder_bench.datasets.grammar import Grammar, draw_value
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import Task

NOTED = "Noted."


@dataclass(frozen=True)
class Lookup(Task):
    """As many lines as fit.

    Args:
        questions: number of names asked for.
    """

    questions: int = 20

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"lookup.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, lines = Random(seed), dict[str, str]()
        prompt = PROMPTS["niah_kv"].of(sources.wording)
        left = tokens - sum(map(sources.count_tokens, (NOTED, prompt.opening)))
        left -= 2 * MESSAGE_MARKER_TOKENS
        for name, value in _pairs(sources.grammar, random):
            if name in lines:
                continue
            left -= sources.count_tokens(f" {name}: {value}.")
            if left < 0:
                break
            lines[name] = value
        if len(lines) < self.questions:
            raise BadParameter(
                f"lookup.questions is {self.questions}, but {tokens} tokens hold {len(lines)} "
                "lines: ask fewer, or write more tokens."
            )
        text = " ".join(f"{name}: {value}." for name, value in lines.items())
        asked = random.sample(list(lines), self.questions)
        questions = [prompt.ask(Question("", lines[name], "lookup"), name) for name in asked]
        return worded_text(
            f"lookup-{tokens}-{seed}",
            text,
            questions,
            sources.wording,
            prompt.opening,
            NOTED,
            starts=[text.index(f"{name}: {lines[name]}.") for name in asked],
        )


def _pairs(grammar: Grammar, random: Random) -> Iterator[tuple[str, str]]:
    while True:
        name, code = (draw_value(kind, grammar.words, random) for kind in ("brand", "code"))
        yield name, f"{code}{random.randint(10, 99)}"


Part = Lookup
