"""LongBench v2, from a local folder: multiple-choice questions about a long text.

Yushi Bai et al., "LongBench v2: Towards Deeper Understanding and Reasoning on Realistic
Long-context Multitasks" (2024), arXiv:2412.15204. The folder `longbench_v2` of `--data` holds the
release's `data.json` (or `data.jsonl`), with `context`, `question`, `choice_A` to `choice_D` and
`answer` on each sample. Seeds select samples in turn; a context that is too long loses its middle,
as in the released code. The prompt is our own, plain one, and the answer is one letter; the paper's
score, whether the right letter is chosen, is the data set's own (`choice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from larder.core import BadParameter, Conversation, InputError, Question
from larder_bench.datasets.documents import document_conversation
from larder_bench.datasets.json_lines import Fields, read_lines, read_list, required_field
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask

FOLDER = "longbench_v2"
LETTERS = ("A", "B", "C", "D")
DIFFICULTIES, LENGTHS = ("", "easy", "hard"), ("", "short", "medium", "long")
ANSWER = "{question}\nAnswer with one letter alone."


@dataclass(frozen=True)
class LongbenchV2(BenchTask):
    """Sample of the data set.

    Args:
        difficulty: difficulty of the samples: easy, hard, or empty for all.
        length: length of the samples: short, medium, long, or empty for all.
    """

    difficulty: str = ""
    length: str = ""

    def __post_init__(self) -> None:
        for name, known in (("difficulty", DIFFICULTIES), ("length", LENGTHS)):
            if (value := getattr(self, name)) not in known:
                choices = ", ".join(repr(one) for one in known)
                raise BadParameter(f"longbench_v2.{name} must be one of {choices}, got {value!r}.")

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        samples = self._samples(sources)
        sample = samples[seed % len(samples)]
        text = str(required_field(sample, "context", FOLDER))
        name = f"longbench_v2-{tokens}-{seed}"
        question = _question(sample)
        return document_conversation(name, text, question, tokens, sources, question_prompt=ANSWER)

    def _samples(self, sources: TaskSources) -> Sequence[Fields]:
        path = _file(sources.folder(FOLDER))
        samples = sources.once(path, read_list if path.suffix == ".json" else read_lines)
        fields = {"difficulty": self.difficulty, "length": self.length}
        selected = {name: value for name, value in fields.items() if value}
        kept = [one for one in samples if all(one.get(n) == value for n, value in selected.items())]
        if not kept:
            selection = " and ".join(f"{name} {value!r}" for name, value in selected.items())
            raise InputError(f"{path} has no sample of {selection}: ask for others.")
        return kept


def _file(folder: Path) -> Path:
    for name in ("data.json", "data.jsonl"):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder} must hold the release's data.json, and does not.")


def _question(sample: Fields) -> Question:
    answer = str(required_field(sample, "answer", FOLDER)).strip()
    if answer not in LETTERS:
        raise InputError(f"a sample of {FOLDER} must have one of A to D as 'answer'.")
    choices = [(one, str(required_field(sample, f"choice_{one}", FOLDER))) for one in LETTERS]
    question = str(required_field(sample, "question", FOLDER)).strip()
    lines = [question, *(f"{letter}. {text}" for letter, text in choices)]
    kind = " ".join(str(sample[name]) for name in ("difficulty", "length") if sample.get(name))
    return Question("\n".join(lines), answer, kind, scorer="choice")


Part = LongbenchV2
