"""Sources of tasks: token counts, filler words, and folders of data sets.

Nothing is read before a task asks for it, and nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from larder.core import UsageError
from larder.session import Embedder
from larder_bench.datasets.corpus import (
    Dialogue,
    read_dialogues,
    read_prose,
    sentences_of_prose,
    sentences_of_small_talk,
)
from larder_bench.datasets.grammar import Grammar, load_grammar
from larder_bench.datasets.task_prompts import Wording

T = TypeVar("T")
PROSE, DIALOGUES = "prose.jsonl.xz", "sgd_{split}.jsonl.xz"


@dataclass(frozen=True)
class TaskSources:
    """Sources that tasks draw from.

    Args:
        count_tokens: returns the number of the model's tokens of a text.
        corpus: folder of `--corpus`, with prose and dialogues as `datasets/corpus.py` reads them.
        wording: wording of the prompts, chosen by the model.
        split: dialogues of the corpus: `dev`, or `train`, which models are trained on.
        data: folder of `--data`, with a folder for each public data set, such as `locomo`.
    """

    count_tokens: Callable[[str], int]
    corpus: Path | None = None
    data: Path | None = None
    wording: Wording = Wording.SEED
    split: str = "dev"
    _read: dict[Path, Any] = field(default_factory=dict[Path, Any], compare=False, repr=False)

    @cached_property
    def grammar(self) -> Grammar:
        """Grammar of life-logs; it is part of the package."""
        return load_grammar()

    @cached_property
    def prose(self) -> tuple[str, ...]:
        """Texts of the corpus.

        Raises:
            UsageError: no corpus was given.
        """
        return read_prose(self._in_corpus(PROSE))

    @cached_property
    def dialogues(self) -> tuple[Dialogue, ...]:
        """Dialogues of the corpus with at least one booking.

        Raises:
            UsageError: no corpus was given.
        """
        return read_dialogues(self._in_corpus(DIALOGUES.format(split=self.split)))

    def sentences_of_prose(self, random: Random) -> Iterator[str]:
        """Endless sentences of the corpus.

        Raises:
            UsageError: no corpus was given.
        """
        return sentences_of_prose(self.prose, random)

    def sentences_of_small_talk(self, random: Random) -> Iterator[str]:
        """Endless small talk, which needs no corpus."""
        return sentences_of_small_talk(self.grammar, random)

    def embedder(self, name: str) -> Embedder:
        """Text embedder, loaded at first use."""
        from larder.session import load_embedder

        return self.once(Path(name), lambda path: load_embedder(name))

    def folder(self, name: str) -> Path:
        """Folder of a public data set.

        Raises:
            UsageError: no data folder was given, or it does not contain that folder.
        """
        if self.data is None:
            raise UsageError(f"{name} is not part of the package: give its folder, --data FOLDER.")
        if not (self.data / name).is_dir():
            raise UsageError(f"--data {self.data} must contain a folder {name!r}, but does not.")
        return self.data / name

    def once(self, path: Path, read: Callable[[Path], T]) -> T:
        """Contents of a file, read at first use."""
        if path not in self._read:
            self._read[path] = read(path)
        return self._read[path]

    def _in_corpus(self, name: str) -> Path:
        if self.corpus is None:
            raise UsageError(
                f"{name} is not part of the package: give its folder, --corpus FOLDER."
            )
        return self.corpus / name
