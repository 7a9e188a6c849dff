"""Code completion: Python source, and the question for its next line.

The form is that of LCC in Yushi Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long
Context Understanding" (2023), arXiv:2308.14508, section 3, scored by edit similarity; here the
source is the standard library of the Python that runs, so that rows of another version have another
digest of the text. Seeds select the files; a text that one file does not fill begins with others.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from larder.core import BadParameter, Conversation, InputError, Question
from larder.session import ACKNOWLEDGEMENT
from larder_bench.datasets.documents import LETTERS_PER_TOKEN
from larder_bench.datasets.lifelog_sessions import MESSAGE_MARKER_TOKENS
from larder_bench.datasets.prompt_templates import PROMPTS, worded_text
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import BenchTask

KIND = "code"
LINE_LETTERS = 12  # a line to be completed has as many or more
NO_STATEMENTS = ("#", '"', "'", "@")


@dataclass(frozen=True)
class Code(BenchTask):
    """Source up to a line, which is asked for."""

    def make(self, seed: int, tokens: int, sources: TaskSources) -> Conversation:
        random, count = Random(seed), sources.count_tokens
        prompt = PROMPTS[KIND].of(sources.wording)
        left = tokens - count(prompt.opening) - count(ACKNOWLEDGEMENT) - 2 * MESSAGE_MARKER_TOKENS
        lines, last = _source(random, 2 * max(0, tokens) * LETTERS_PER_TOKEN, sources)
        stop = random.choice([n for n in range(last, len(lines)) if _is_statement(lines, n)])
        start = stop
        while start:
            left -= count(f"{lines[start - 1]}\n")
            if left < 0:
                break
            start -= 1
        if start == stop:
            raise BadParameter(f"code.tokens must hold a line, got {tokens}: take more.")
        text = "\n".join(lines[start:stop])
        answer = Question("", lines[stop].strip(), KIND, scorer="edit_similarity")
        question = prompt.ask(answer, "")
        return worded_text(
            f"{KIND}-{tokens}-{seed}", text, [question], sources.wording, prompt.opening
        )


def _source(random: Random, characters: int, sources: TaskSources) -> tuple[list[str], int]:
    """Lines of files of at least so many characters, and the middle of the last file's."""
    files, drawn, letters = _files(), list[Sequence[str]](), 0
    for path in random.sample(files, len(files)):
        drawn.append(sources.once(path, _read))
        letters += sum(map(len, drawn[-1]))
        if letters >= characters and any(map(str.strip, drawn[-1])):
            break
    *others, last = drawn
    before = [line for lines in others for line in lines]
    return [*before, *last], len(before) + len(last) // 2


def _files() -> list[Path]:
    """Modules of the standard library, without private ones."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]
    if not paths:
        raise InputError(f"{folder} holds no source of the standard library.")
    return paths


def _read(path: Path) -> Sequence[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text ({error}).") from error


def _is_statement(lines: Sequence[str], number: int) -> bool:
    line = lines[number].strip()
    return len(line) >= LINE_LETTERS and not line.startswith(NO_STATEMENTS)


Part = Code
