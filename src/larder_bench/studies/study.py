"""A study: which policies do what on which tasks, and what it is to show; as a file in TOML.

    name = "needles"
    claim = "Scores by the keys alone find needles that scores by past attention lose."
    models = ["seed"]
    measure = "forced"            # or another; see bench/measures; one or a list
    matched = ["bytes", "tokens"] # or total; one or a list
    budgets = ["1/4", "1/8"]
    files = 9
    policies = ["snapkv", "keydiff"]
    controls = ["full", "random", "oracle", "exact_topk", "rag_2k", "rag_episodic"]

    [[tasks]]
    spelling = "needles()"
    tokens = [1500, 4000]

Keys that are left out take the values of `Study`. One that nobody knows is refused. What a paper
reports of the same stands in a table `[paper]` (`larder_bench.results.papers`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from larder.core.errors import InputError, UnknownName, UsageError
from larder.core.family import unknown_name_message
from larder_bench.results.papers import Paper, nameable_budgets
from larder_bench.results.toml_tables import convert_table

CONTROLS = ("full", "random", "oracle", "exact_topk", "rag_2k", "rag_episodic")
FOLDER = "studies"
CHECKOUT = Path(__file__).parents[3]
MATCHED = ("bytes", "total", "tokens")


@dataclass(frozen=True)
class StudyTask:
    """A task as it is spelled, and the lengths of what it makes."""

    spelling: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Study:
    """Study as its file spells it, before any name is resolved.

    Args:
        claim: what it is to show.
        models: each as `--model` takes it.
        measure: each as it is spelled.
        matched: what is held equal, `bytes`, `total` or `tokens`; each by itself.
        budgets: `1/8` or `12.5%` of the full cache, `512` tokens, `64MiB`.
        files: conversations of each task and length, one per seed.
        first_seed: of the first of them.
        policies: names or sentences.
        controls: what policies are held against.
        paper: what a paper reports of the same.
    """

    name: str
    tasks: tuple[StudyTask, ...]
    claim: str = ""
    models: tuple[str, ...] = ("seed",)
    measure: tuple[str, ...] = ("forced",)
    matched: tuple[str, ...] = ("bytes", "tokens")
    budgets: tuple[str, ...] = ("1/4", "1/8")
    files: int = 9
    first_seed: int = 0
    policies: tuple[str, ...] = ()
    controls: tuple[str, ...] = CONTROLS
    paper: Paper | None = None

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise UsageError(
                f"A study's name must be a word that a file can have, got {self.name!r}: write "
                "letters, digits and signs such as _ and -."
            )
        if self.first_seed < 0:
            raise UsageError(f"first_seed must be 0 or more, got {self.first_seed}.")
        if not self.tasks or not all(task.tokens for task in self.tasks):
            raise UsageError(f"The study {self.name!r} has no tasks: name one with its tokens.")
        if not self.policies and not self.controls:
            raise UsageError(f"The study {self.name!r} compares nothing: name policies.")
        if self.files < 1:
            raise UsageError(f"files must be 1 or more, got {self.files}.")
        for name in ("models", "measure", "matched", "budgets"):
            if not getattr(self, name):
                raise UsageError(f"The study {self.name!r} names no {name}: name one or more.")
        lengths = [tokens for task in self.tasks for tokens in task.tokens]
        if min(lengths) < 1:
            raise UsageError(f"tokens must be 1 or more, got {min(lengths)}.")
        for matched in self.matched:
            if matched not in MATCHED:
                raise UnknownName(
                    unknown_name_message("way to match budgets", matched, list(MATCHED))
                )
        if self.paper is not None:
            self.paper.check(f"The study {self.name!r}", self._named())

    def _named(self) -> dict[str, Sequence[Any]]:
        """Names that a paper's values can refer to."""
        policies = self.policies + self.controls
        return {
            "policy": policies,
            "against": policies,
            "above": policies,
            "budget": nameable_budgets(self.budgets),
            "task": [task.spelling for task in self.tasks],
            "tokens": [tokens for task in self.tasks for tokens in task.tokens],
            "measure": self.measure,
            "matched": self.matched,
        }


def replace_fields(study: Study, fields: Mapping[str, Any]) -> Study:
    """The study with other fields; what its paper reports of what is not run any more is left out.

    Raises:
        UsageError, UnknownName: a value is not what its field takes.
    """
    other = replace(study, paper=None, **fields)
    if study.paper is None:
        return other
    named = other._named()
    kept = tuple(one for one in study.paper.values if one.is_among(named))
    return replace(other, paper=replace(study.paper, values=kept))


def read_study(name: str) -> Study:
    """The study of a file, or the one of that name in the folder `studies`.

    Raises:
        UnknownName: there is none; or a key of it nobody knows.
        InputError: the file cannot be read.
        UsageError: a value is not what its key takes.
    """
    path = _study_path(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): name a file, or one of the studies "
            f"{', '.join(study_names()) or '(none here)'}."
        ) from error
    except ValueError as error:
        raise InputError(f"{path} cannot be read as TOML ({error}): mend it.") from error
    return convert_table(table, Study, str(path))


def study_names() -> list[str]:
    """Studies in the folder `studies`, here or in the checkout."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.toml")})


def _study_path(name: str) -> Path:
    if name.endswith(".toml"):
        return Path(name)
    for folder in _folders():
        if (path := folder / f"{name}.toml").is_file():
            return path
    raise UnknownName(unknown_name_message("study", name, study_names()))


def _folders() -> list[Path]:
    return [folder for folder in (Path(FOLDER), CHECKOUT / FOLDER) if folder.is_dir()]
