"""Needles in a haystack: facts that appear once in a long, unrelated text.

After Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language
Models?" (2024), arXiv:2404.06654, in its wording (`larder_bench.datasets.task_prompts`) or in the
one that the bundled models were trained on; keys are invented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from string import ascii_uppercase

from larder.core import BadParameter, Conversation, Question, UnknownName
from larder.session import ACKNOWLEDGEMENT
from larder_bench.datasets.grammar import Grammar, draw_value, load_grammar
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import Wording
from larder_bench.scoring.answer_items import Spans, join_items

NAMES_PER_CHAIN = (2, 4)
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)


@dataclass(frozen=True)
class Needle:
    """Lines to hide, and what they answer.

    Args:
        lines: lines in their order.
        names: names that the lines give a value to.
        subject: what the question asks for.
        answer: expected answer; empty for a distractor, which is not asked for.
        items: character ranges of the answer that are scored separately.
    """

    lines: tuple[str, ...]
    names: frozenset[str]
    subject: str
    answer: str = ""
    items: Spans = ()


def needles_conversation(
    seed: int,
    tokens: int,
    count_tokens: Callable[[str], int],
    sentences: Callable[[Random], Iterator[str]],
    kind: str,
    needles: int,
    wording: Wording = Wording.SEED,
) -> Conversation:
    """Text of at most `tokens` tokens with needles in it; equal seeds give equal texts.

    Args:
        seed: seed of all random choices.
        tokens: maximum number of tokens of the text and its acknowledgment, markers included.
        count_tokens: returns the number of tokens of a text.
        sentences: endless haystack.
        kind: `magic` numbers of invented things, `kv` lines of a name and a code, one `passkey`,
            or `vars`, chains of variables that refer to each other.
        needles: number of needles; there is only one pass key.

    Raises:
        BadParameter: the needles do not fit.
        UnknownName: the kind does not exist.
    """
    if kind not in KINDS:
        raise UnknownName(f"no kind of needle {kind!r}: there are {', '.join(KINDS)}.")
    if needles < 1:
        raise BadParameter(f"needles.needles must be 1 or more, got {needles}.")
    random, grammar = Random(seed), load_grammar()
    draw = KINDS[kind] if kind != "vars" or wording is Wording.SEED else _chain_of_names
    hidden = draw_distinct(draw, grammar, random, 1 if kind == "passkey" else needles)
    haystack = HaystackText(sentences(random), random, count_tokens, tokens, wording)
    return haystack.conversation(f"needles-{tokens}-{seed}", f"niah_{kind}", hidden)


@dataclass(frozen=True)
class HaystackText:
    """Text to hide needles in.

    Args:
        sentences: endless haystack.
        random: source of the positions of needles and the order of questions.
        count_tokens: returns the number of tokens of a text.
        tokens: maximum number of tokens of the whole conversation, markers included.
        wording: wording of the prompts.
    """

    sentences: Iterator[str]
    random: Random
    count_tokens: Callable[[str], int]
    tokens: int
    wording: Wording = Wording.SEED

    @staticmethod
    def of(sources: TaskSources, hay: Haystack, random: Random, tokens: int) -> HaystackText:
        """Haystack of a kind, in the wording of the sources.

        Raises:
            UsageError: it needs a corpus, and none was given.
        """
        sentences = hay.sentences(sources, random)
        return HaystackText(sentences, random, sources.count_tokens, tokens, sources.wording)

    def conversation(
        self, name: str, prompts: str, needles: Sequence[Needle], kind: str = ""
    ) -> Conversation:
        """Text with needles, and the needles' questions.

        Args:
            prompts: name of the prompts, see `larder_bench.datasets.prompt_templates.PROMPTS`.
            kind: kind of the questions; empty for the name of the prompts.

        Raises:
            BadParameter: the needles do not fit.
        """
        prompt = PROMPTS[prompts].of(self.wording)
        room = self.tokens - self.count_tokens(prompt.opening)
        room -= self.count_tokens(ACKNOWLEDGEMENT) + 2 * MESSAGE_MARKER_TOKENS
        text = _haystack_text(needles, self.sentences, self.random, self.count_tokens, room)
        asked = [one for one in self.random.sample(needles, len(needles)) if one.answer]
        questions = [
            prompt.ask(
                Question("", needle.answer, kind or prompts, items=needle.items), needle.subject
            )
            for needle in asked
        ]
        single = [needle.lines[0] if len(needle.lines) == 1 else "" for needle in asked]
        return worded_text(
            name,
            text,
            questions,
            self.wording,
            prompt.opening,
            starts=[text.index(line) if line else None for line in single],
        )


def draw_distinct(
    draw: Callable[[Grammar, Random], Needle], grammar: Grammar, random: Random, count: int
) -> list[Needle]:
    """Needles with distinct names, `count` of them."""
    needles: list[Needle] = []
    while len(needles) < count:
        needle = draw(grammar, random)
        if all(needle.names.isdisjoint(other.names) for other in needles):
            needles.append(needle)
    return needles


def _haystack_text(
    needles: Sequence[Needle],
    sentences: Iterator[str],
    random: Random,
    count_tokens: Callable[[str], int],
    max_tokens: int,
) -> str:
    # Sentences are counted separately, each with the space before it: an upper bound of the whole.
    left = max_tokens - sum(count_tokens(f" {line}") for needle in needles for line in needle.lines)
    if left < 0:
        raise BadParameter(
            f"needles.tokens must hold {len(needles)} needles, got {max_tokens} tokens for them: "
            "take fewer needles or more tokens."
        )
    filler: list[str] = []
    for sentence in sentences:
        left -= count_tokens(f" {sentence}")
        if left < 0:
            break
        filler.append(sentence)
    return " ".join(_scatter(filler, needles, random))


def _scatter(filler: list[str], needles: Sequence[Needle], random: Random) -> Iterator[str]:
    """Filler sentences with every line at a random position, the lines of a needle in order."""
    placed: list[tuple[int, str]] = []
    for needle in needles:
        positions = sorted(random.randint(0, len(filler)) for _ in needle.lines)
        placed += zip(positions, needle.lines, strict=True)
    placed.sort(key=lambda place: place[0])
    start = 0
    for position, line in placed:
        yield from filler[start:position]
        yield line
        start = position
    yield from filler[start:]


def draw_key(grammar: Grammar, random: Random) -> str:
    """Random name of a thing that a magic number belongs to."""
    color, brand = (draw_value(kind, grammar.words, random) for kind in ("color", "brand"))
    return f"{color} {brand.lower()}"


def draw_number(random: Random) -> str:
    """Random magic number."""
    return str(random.randint(10**6, 10**7 - 1))


def magic_line(key: str, number: str) -> str:
    """Line that states a magic number."""
    return f"One of the special magic numbers for {key} is: {number}."


def draw_magic_number(grammar: Grammar, random: Random) -> Needle:
    """Needle with one number of one thing."""
    key, number = draw_key(grammar, random), draw_number(random)
    return Needle((magic_line(key, number),), frozenset({key}), key, number)


def _pass_key(grammar: Grammar, random: Random) -> Needle:
    value = str(random.randint(10**4, 10**5 - 1))
    line = f"The pass key is {value}. Remember it. {value} is the pass key."
    return Needle((line,), frozenset(), "", value)


def _key_value(grammar: Grammar, random: Random) -> Needle:
    key, code = (draw_value(kind, grammar.words, random) for kind in ("brand", "code"))
    value = f"{code}{random.randint(10, 99)}"
    return Needle((f"{key}: {value}.",), frozenset({key}), key, value)


def variable_chain(random: Random, length: int, asks_names: bool = False) -> Needle:
    """Chain of `length` variables, each but the first referring to the one before it.

    Args:
        asks_names: whether the names of all variables of the value are asked for, as RULER does;
            else the value of the last variable.
    """
    value, names = str(random.randint(10**4, 10**5 - 1)), list[str]()
    while len(names) < length:
        name = "".join(random.choice(ascii_uppercase) for _ in range(3))
        names += [] if name in names else [name]
    follow = (f"VAR {new} = VAR {old}." for old, new in zip(names, names[1:], strict=False))
    lines = (f"VAR {names[0]} = {value}.", *follow)
    if not asks_names:
        return Needle(lines, frozenset(names), names[-1], value)
    return Needle(lines, frozenset(names), value, *join_items(names))


def _chain(grammar: Grammar, random: Random) -> Needle:
    return variable_chain(random, random.randint(*NAMES_PER_CHAIN))


def _chain_of_names(grammar: Grammar, random: Random) -> Needle:
    return variable_chain(random, random.randint(*NAMES_PER_CHAIN), asks_names=True)


KINDS: Mapping[str, Callable[[Grammar, Random], Needle]] = {
    "magic": draw_magic_number,
    "kv": _key_value,
    "passkey": _pass_key,
    "vars": _chain,
}


class Haystack(Enum):
    """Filler text of a haystack.

    TALK: small talk.
    PROSE: passages of a corpus, `--corpus FOLDER`.
    NOISE: the same five short sentences over and over, as in the original pass key task.
    """

    TALK = "talk"
    PROSE = "prose"
    NOISE = "noise"

    def sentences(self, sources: TaskSources, random: Random) -> Iterator[str]:
        """Endless sentences.

        Raises:
            UsageError: a corpus is needed and none was given.
        """
        if self is Haystack.PROSE:
            return sources.sentences_of_prose(random)
        return _noise() if self is Haystack.NOISE else sources.sentences_of_small_talk(random)


def _noise() -> Iterator[str]:
    while True:
        yield from NOISE
