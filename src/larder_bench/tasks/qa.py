"""Question answering over paragraphs, most of which belong to other questions.

Cheng-Ping Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?"
(2024), arXiv:2404.06654, section 3.4 (QA). RULER takes SQuAD and HotpotQA, which are not part of
the package: the `NAME.jsonl` files of the folder `ruler_qa` of `--data` hold `question`, `answers`
and `context`, a list of paragraphs, on each line. RULER asks one question of a text; here several
share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from larder.core import BadParameter, Conversation, InputError, Question
from larder.session import ACKNOWLEDGEMENT
from larder_bench.datasets.json_lines import Fields, read_lines, required_field
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask

KIND, FOLDER = "qa", "ruler_qa"
DOCUMENT = "Document {number}:\n{text}"
SEPARATOR = "\n\n"
MAX_DOCUMENTS = 9999  # of a text; no number takes more tokens


@dataclass(frozen=True)
class QaSample:
    """Question, its answers, and the paragraphs that answer it."""

    question: str
    answers: tuple[str, ...]
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class QuestionAnswering(BenchTask):
    """Paragraphs of several questions, and others of the same file as far as they fit.

    Args:
        questions: maximum number of questions; as many as their paragraphs fit.
        set: name of the file, such as "squad"; empty for the only one.
    """

    questions: int = 4
    set: str = ""

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise BadParameter(f"qa.questions must be 1 or more, got {self.questions}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, count, samples = Random(seed), sources.count_tokens, self._samples(sources)
        prompt = PROMPTS[KIND].of(sources.wording)
        left = tokens - count(prompt.opening) - count(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
        asked, taken = list[QaSample](), dict[str, None]()
        drawn = random.sample(samples, len(samples))
        for sample in drawn:
            new = [one for one in dict.fromkeys(sample.paragraphs) if one not in taken]
            cost = sum(_cost(one, sources) for one in new)
            # Once there are enough questions, paragraphs are taken one by one.
            if len(asked) < self.questions and cost <= left:
                asked.append(sample)
                taken |= dict.fromkeys(new)
                left -= cost
        if not asked:
            raise BadParameter(f"qa.tokens must hold the paragraphs of a question, got {tokens}.")
        for paragraph in dict.fromkeys(one for sample in drawn for one in sample.paragraphs):
            cost = 0 if paragraph in taken else _cost(paragraph, sources)
            if cost <= left:
                taken[paragraph] = None
                left -= cost
        paragraphs = random.sample(list(taken), len(taken))
        documents = [
            DOCUMENT.format(number=number, text=text) for number, text in enumerate(paragraphs, 1)
        ]
        text = SEPARATOR.join(documents)
        questions = [
            prompt.ask(
                Question("", sample.answers[0], KIND, others=sample.answers[1:]), sample.question
            )
            for sample in asked
        ]
        single = [one.paragraphs[0] if len(one.paragraphs) == 1 else "" for one in asked]
        starts = [text.index(paragraph) if paragraph else None for paragraph in single]
        name = f"{KIND}-{tokens}-{seed}"
        return worded_text(name, text, questions, sources.wording, prompt.opening, starts=starts)

    def _samples(self, sources: TaskSources) -> Sequence[QaSample]:
        folder = sources.folder(FOLDER)
        known = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
        name = self.set or (next(iter(known)) if len(known) == 1 else "")
        if name not in known:
            names = ", ".join(known) or "no .jsonl file at all"
            raise InputError(f"{folder} holds no {name or 'single'} .jsonl file: it holds {names}.")
        return sources.once(known[name], _read)


def _cost(paragraph: str, sources: TaskSources) -> int:
    document = DOCUMENT.format(number=MAX_DOCUMENTS, text=paragraph)
    return sources.count_tokens(f"{document}{SEPARATOR}")


def _read(path: Path) -> Sequence[QaSample]:
    return [_sample(fields, path.name) for fields in read_lines(path)]


def _sample(fields: Fields, name: str) -> QaSample:
    question, answers, context = (
        required_field(fields, key, name) for key in ("question", "answers", "context")
    )
    if not isinstance(answers, list) or not answers or not isinstance(context, list) or not context:
        raise InputError(f"a sample of {name} must have lists of 'answers' and of 'context'.")
    return QaSample(str(question), tuple(map(str, answers)), tuple(map(str, context)))


Part = QuestionAnswering
