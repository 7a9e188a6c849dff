"""Look-up: lines of a name and its value, and questions for some of the names.

Yucheng Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods" (2024),
arXiv:2412.10319, section 3 (Retr.KV). The text is a JSON object as in the paper, of names in
English words and numbers instead of UUIDs; in the bundled models' wording it is sentences of
invented names and codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from larder.core import BadParameter, Conversation, Question
from larder_bench.datasets.grammar import Grammar, draw_value
from larder_bench.datasets.haystack import draw_number
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, PromptTemplate, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import Wording
from larder_bench.tasks.base import BenchTask

KIND = "lookup"
NOTED = "Noted."


@dataclass(frozen=True)
class PairFormat:
    """Format of the pairs of a text: `pair` is a format string with `{name}` and `{value}`, `value`
    that of an answer.
    """

    pair: str
    value: str
    separator: str
    brackets: tuple[str, str]

    def pair_of(self, name: str, value: str) -> str:
        """Text of a pair."""
        return self.pair.format(name=name, value=value)

    def text(self, pairs: Iterable[tuple[str, str]]) -> str:
        """Text of all pairs."""
        return self.separator.join(itertools.starmap(self.pair_of, pairs)).join(self.brackets)


SENTENCES = PairFormat("{name}: {value}.", "{value}", " ", ("", ""))
JSON_OBJECT = PairFormat('"{name}": "{value}"', '"{value}"', ", ", ("{", "}"))


@dataclass(frozen=True)
class Lookup(BenchTask):
    """Lines to look up, as many as fit.

    Args:
        questions: number of names asked for.
    """

    questions: int = 20

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"lookup.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, lines, count = Random(seed), dict[str, str](), sources.count_tokens
        is_seed = sources.wording is Wording.SEED
        written, draw = (SENTENCES, _pairs) if is_seed else (JSON_OBJECT, _english_pairs)
        prompt = PROMPTS[KIND].of(sources.wording)
        left = tokens - sum(map(count, (NOTED, prompt.opening, *filter(None, written.brackets))))
        left -= 2 * MESSAGE_MARKER_TOKENS
        for name, value in draw(sources.grammar, random):
            if name in lines:
                continue
            left -= count(f" {written.pair_of(name, value)}{written.separator.strip()}")
            if left < 0:
                break
            lines[name] = value
        if len(lines) < self.questions:
            raise BadParameter(
                f"lookup.questions is {self.questions}, but {tokens} tokens hold {len(lines)} "
                "lines: ask fewer, or write more tokens."
            )
        text = written.text(lines.items())
        asked = random.sample(list(lines), self.questions)
        return worded_text(
            f"{KIND}-{tokens}-{seed}",
            text,
            [_question(prompt, name, lines[name], written) for name in asked],
            sources.wording,
            prompt.opening,
            NOTED,
            starts=[text.index(written.pair_of(name, lines[name])) for name in asked],
        )


def _question(prompt: PromptTemplate, name: str, value: str, written: PairFormat) -> Question:
    answer = written.value.format(value=value)
    others = () if answer == value else (value,)
    return prompt.ask(Question("", answer, KIND, others=others), name)


def _pairs(grammar: Grammar, random: Random) -> Iterator[tuple[str, str]]:
    """Endless invented names with codes."""
    while True:
        name, code = (draw_value(kind, grammar.words, random) for kind in ("brand", "code"))
        yield name, f"{code}{random.randint(10, 99)}"


def _english_pairs(grammar: Grammar, random: Random) -> Iterator[tuple[str, str]]:
    """Endless names in English words with numbers, as RULER's keys are: small models confuse
    invented names.
    """
    words = grammar.words
    names = [f"{one} {other}".lower() for one in words["adjective"] for other in words["noun"]]
    colors = (f"{color} " for color in words["color"])
    numbers = (f"{number} " for number in itertools.count(2))
    for prefix in itertools.chain([""], colors, numbers):
        for name in random.sample(names, len(names)):
            yield f"{prefix}{name}", draw_number(random)


Part = Lookup
