"""Study: the policies it compares, its tasks, and the claim it tests; written as a TOML file.

    name = "needles"
    claim = "Scores by the keys alone find needles that scores by past attention lose."
    models = ["seed"]
    measure = "forced"            # or another; see bench/measures; one or a list
    matched = ["bytes", "tokens"] # or total; one or a list
    question = ["after", "inside"] # the compressed context; one or a list
    wording = "instruct"          # or seed, plain; default: what the model follows
    budgets = ["1/4", "1/8"]
    files = 9
    policies = ["snapkv", "keydiff"]
    controls = ["full", "random", "oracle", "exact_topk", "rag_2k", "rag_episodic"]

    [[tasks]]
    spelling = "needles()"
    tokens = [1500, 4000]

Missing keys take the defaults of `Study`; unknown keys are errors. Values that a paper reports for
the same comparison go into a table `[paper]` (`larder_bench.results.papers`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from larder.core import InputError, UnknownName, UsageError, unknown_name_message
from larder_bench.datasets.task_prompts import QuestionPlacement, Wording
from larder_bench.results.papers import Paper, nameable_budgets
from larder_bench.results.toml_tables import convert_table

CONTROLS = ("full", "random", "oracle", "exact_topk", "rag_2k", "rag_episodic")
FOLDER = "studies"
CHECKOUT = Path(__file__).parents[3]
MATCHED = ("bytes", "total", "tokens")
PLACEMENTS = tuple(placement.value for placement in QuestionPlacement)
WORDINGS = tuple(wording.value for wording in Wording)


@dataclass(frozen=True)
class StudyTask:
    """Spelling of a task, and the lengths of its conversations in tokens."""

    spelling: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Study:
    """Study as its file spells it, before any name is resolved.

    Args:
        claim: claim that the study tests.
        models: models as `--model` takes them.
        measure: spellings of measures.
        matched: matched quantities, `bytes`, `total` or `tokens`, each measured separately.
        question: places of the question, `after` or `inside` the compressed context, each
            measured separately (`larder_bench.datasets.task_prompts.QuestionPlacement`).
        wording: `seed`, `instruct` or `plain`; empty for the one that the model follows.
        budgets: `1/8` or `12.5%` of the full cache, `512` tokens, `64MiB`.
        files: number of conversations of each task and length, one per seed.
        first_seed: seed of the first conversation.
        policies: names or sentences.
        controls: methods that policies are compared with.
        paper: values that a paper reports for the same comparison.
    """

    name: str
    tasks: tuple[StudyTask, ...]
    claim: str = ""
    models: tuple[str, ...] = ("seed",)
    measure: tuple[str, ...] = ("forced",)
    matched: tuple[str, ...] = ("bytes", "tokens")
    question: tuple[str, ...] = ("after",)
    wording: str = ""
    budgets: tuple[str, ...] = ("1/4", "1/8")
    files: int = 9
    first_seed: int = 0
    policies: tuple[str, ...] = ()
    controls: tuple[str, ...] = CONTROLS
    paper: Paper | None = None

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise UsageError(
                f"A study's name must be a valid file name, got {self.name!r}: write "
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
        for name in ("models", "measure", "matched", "budgets", "question"):
            if not getattr(self, name):
                raise UsageError(f"The study {self.name!r} names no {name}: name one or more.")
        lengths = [tokens for task in self.tasks for tokens in task.tokens]
        if min(lengths) < 1:
            raise UsageError(f"tokens must be 1 or more, got {min(lengths)}.")
        for what, names, known in (
            ("quantity to match", self.matched, MATCHED),
            ("place of the question", self.question, PLACEMENTS),
            ("wording", (self.wording,) if self.wording else (), WORDINGS),
        ):
            for name in names:
                if name not in known:
                    raise UnknownName(unknown_name_message(what, name, list(known)))
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
            "question": self.question,
        }


def replace_fields(study: Study, fields: Mapping[str, Any]) -> Study:
    """Study with other fields; reported values that the new study does not cover are removed.

    Raises:
        UsageError, UnknownName: a value is invalid for its field.
    """
    other = replace(study, paper=None, **fields)
    if study.paper is None:
        return other
    names = other._named()
    kept = tuple(one for one in study.paper.values if one.is_among(names))
    return replace(other, paper=replace(study.paper, values=kept))


def read_study(name: str) -> Study:
    """Study of a file, or of that name in the folder `studies`.

    Raises:
        UnknownName: the study does not exist, or has an unknown key.
        InputError: the file cannot be read.
        UsageError: a value has another type than its key.
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
        raise InputError(f"{path} cannot be read as TOML ({error}): correct it.") from error
    return convert_table(table, Study, str(path))


def study_names() -> list[str]:
    """Names of the studies in the folder `studies`, here or in the checkout."""
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
