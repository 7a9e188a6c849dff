"""Text and its real continuation: fidelity of a cache without questions.

No paper: the answer is the continuation, every token of which is scored. Compared with the full
cache token by token, it gives the fidelity: the divergence, and how often the likeliest token is
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from random import Random

from larder.core import BadParameter, Conversation, InputError, Question
from larder.session import ACKNOWLEDGEMENT, read_document
from larder_bench.datasets.documents import LETTERS_PER_TOKEN, head_tokens
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import Wording
from larder_bench.tasks.base import BenchTask

KIND = "text"
CONTINUE_PROMPT = "Go on with the text."
ENDINGS = (".txt", ".md")


class TextSource(Enum):
    """Source of the text.

    TALK: small talk.
    PROSE: the corpus, `--corpus FOLDER`.
    FILES: files of the folder `text` of `--data`, in turn by seed.
    """

    TALK = "talk"
    PROSE = "prose"
    FILES = "files"


@dataclass(frozen=True)
class TextTask(BenchTask):
    """Text cut in two: a context and its continuation.

    Args:
        of: source of the text.
        following: approximate number of tokens after the cut, in addition to the conversation's.
    """

    of: TextSource = TextSource.TALK
    following: int = 128

    def __post_init__(self) -> None:
        if self.following < 1:
            raise BadParameter(f"text.following must be 1 or more, got {self.following}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        count = sources.count_tokens
        limit = tokens - count(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
        text = self._text(seed, max(0, limit) + self.following, sources)
        context = head_tokens(text, limit, count)
        rest = text[len(context) :].strip()
        answer = head_tokens(rest, self.following, count)
        if not context or not answer:
            raise BadParameter(
                f"text.tokens is {tokens}, and {self.following} tokens must follow, but the text "
                f"has only {count(text)}: take fewer tokens or a longer text."
            )
        name = f"{KIND}-{tokens}-{seed}"
        question = Question(CONTINUE_PROMPT, answer, KIND)
        document = replace(read_document(context, name), questions=(question,))
        return _worded(document, sources.wording)

    def _text(self, seed: int, tokens: int, sources: TaskSources) -> str:
        """Text of at least `tokens` tokens, if the source has them."""
        random = Random(seed)
        if self.of is TextSource.FILES:
            return _file(seed, sources)
        if self.of is TextSource.PROSE:
            return _filled(_passages(sources, random), tokens, "\n\n")
        return _filled(sources.sentences_of_small_talk(random), tokens, " ")


def _worded(document: Conversation, wording: Wording) -> Conversation:
    """Document in the layout of a wording; in PLAIN the text continues without a question."""
    if wording is Wording.SEED:
        return document
    prompt = "" if wording is Wording.PLAIN else "\n\n{question}"
    return replace(document, form=wording.layout, question_prompt=prompt)


def _passages(sources: TaskSources, random: Random) -> Iterator[str]:
    """Endless texts of the corpus in random order, the first from a random offset."""
    texts = random.sample(sources.prose, len(sources.prose))
    yield texts[0][random.randrange(len(texts[0])) :].lstrip()
    while True:
        yield from texts[1:] or texts


def _filled(parts: Iterator[str], tokens: int, joint: str) -> str:
    selected, characters = list[str](), 0
    for part in parts:
        selected.append(part)
        characters += len(part) + len(joint)
        if characters > tokens * LETTERS_PER_TOKEN:
            return joint.join(selected)
    return joint.join(selected)


def _file(seed: int, sources: TaskSources) -> str:
    folder = sources.folder(KIND)
    paths = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS)
    if not paths:
        raise InputError(f"{folder} must hold texts as {' or '.join(ENDINGS)} files.")
    return sources.once(paths[seed % len(paths)], _read)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text ({error}).") from error


Part = TextTask
