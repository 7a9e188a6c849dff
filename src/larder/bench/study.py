"""A study: which policies do what on which tasks, and what it is to show; as a file in TOML.

    name = "needles"
    claim = "Scores by the keys alone find needles that scores by past attention lose."
    models = ["seed"]
    measure = "forced"            # or generated, fidelity, decode; one or a list
    matched = "bytes"             # or tokens, total; one or a list
    budgets = ["1/4", "1/8"]
    files = 9
    policies = ["snapkv", "keydiff"]
    controls = ["full", "random", "oracle", "exact_topk", "rag_2k", "rag_episodic"]

    [[tasks]]
    spelling = "needles()"
    tokens = [1500, 4000]

Keys that are left out take the values of `Study`. One that nobody knows is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from larder.core.errors import InputError, UnknownName, UsageError
from larder.core.family import unknown

CONTROLS = ("full", "random", "oracle", "exact_topk", "rag_2k", "rag_episodic")
FOLDER = "studies"
CHECKOUT = Path(__file__).parents[3]
MATCHED = ("bytes", "total", "tokens")


@dataclass(frozen=True)
class TaskAt:
    """A task as it is spelled, and the lengths of what it makes."""

    spelling: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Study:
    """What is run, in words: nothing of it is looked up yet.

    Args:
        claim: what it is to show.
        models: each as `--model` takes it.
        measure: each as it is spelled.
        matched: what is held equal, `bytes`, `total` or `tokens`.
        budgets: `1/8` or `12.5%` of the full cache, `512` tokens, `64MiB`.
        files: conversations of each task and length, one per seed.
        first_seed: of the first of them.
        policies: names or sentences.
        controls: what policies are held against.
    """

    name: str
    tasks: tuple[TaskAt, ...]
    claim: str = ""
    models: tuple[str, ...] = ("seed",)
    measure: tuple[str, ...] = ("forced",)
    matched: tuple[str, ...] = ("bytes",)
    budgets: tuple[str, ...] = ("1/4", "1/8")
    files: int = 9
    first_seed: int = 0
    policies: tuple[str, ...] = ()
    controls: tuple[str, ...] = CONTROLS

    def __post_init__(self) -> None:
        if not self.tasks or not all(task.tokens for task in self.tasks):
            raise UsageError(f"The study {self.name!r} has no tasks: name one with its tokens.")
        if not self.policies and not self.controls:
            raise UsageError(f"The study {self.name!r} compares nothing: name policies.")
        if self.files < 1:
            raise UsageError(f"files must be 1 or more, got {self.files}.")
        lengths = [tokens for task in self.tasks for tokens in task.tokens]
        if min(lengths) < 1:
            raise UsageError(f"tokens must be 1 or more, got {min(lengths)}.")
        for matched in self.matched:
            if matched not in MATCHED:
                raise UnknownName(unknown("way to match budgets", matched, list(MATCHED)))


def read_study(name: str) -> Study:
    """The study of a file, or the one of that name in the folder `studies`.

    Raises:
        UnknownName: there is none; or a key of it nobody knows.
        InputError: the file cannot be read.
        UsageError: a value is not what its key takes.
    """
    path = _found(name)
    try:
        fields_of = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): name a file, or one of the studies "
            f"{', '.join(study_names()) or '(none here)'}."
        ) from error
    except ValueError as error:
        raise InputError(f"{path} cannot be read as TOML ({error}): mend it.") from error
    return _study(fields_of, str(path))


def study_names() -> list[str]:
    """Of all files in the folder `studies`, here or in the checkout."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.toml")})


def _found(name: str) -> Path:
    if name.endswith(".toml"):
        return Path(name)
    for folder in _folders():
        if (path := folder / f"{name}.toml").is_file():
            return path
    raise UnknownName(unknown("study", name, study_names()))


def _folders() -> list[Path]:
    return [folder for folder in (Path(FOLDER), CHECKOUT / FOLDER) if folder.is_dir()]


def _study(told: Mapping[str, Any], where: str) -> Study:
    values: dict[str, Any] = {}
    known = [field.name for field in fields(Study)]
    for key, value in told.items():
        if key not in known:
            raise UnknownName(f"{where}: {unknown('key of a study', key, known)}")
        values[key] = _READERS[key](value, f"{where}: {key}")
    for key in ("name", "tasks"):
        if key not in values:
            raise UsageError(f"{where} has no {key}: every study names its {key}.")
    return Study(**values)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} must be a text in quotes, got {value!r}.")
    return value


def _number(value: Any, where: str) -> int:
    if type(value) is not int:
        raise UsageError(f"{where} must be a whole number, got {value!r}.")
    return value


def _many(one: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple[Any, ...]]:
    """Reads one value or a list of them."""

    def read(value: Any, where: str) -> tuple[Any, ...]:
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        return tuple(one(each, where) for each in values)

    return read


def _task(value: Any, where: str) -> TaskAt:
    keys = [field.name for field in fields(TaskAt)]
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be written [[tasks]], got {value!r}.")
    for key in value:
        if key not in keys:
            raise UnknownName(f"{where}: {unknown('key of a task', key, keys)}")
    if set(keys) - set(value):
        raise UsageError(f"{where} needs spelling and tokens, got {', '.join(value) or 'nothing'}.")
    tokens = _many(_number)(value["tokens"], f"{where}.tokens")
    return TaskAt(_text(value["spelling"], f"{where}.spelling"), tokens)


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "name": _text,
    "claim": _text,
    "models": _many(_text),
    "measure": _many(_text),
    "matched": _many(_text),
    "budgets": _many(_text),
    "files": _number,
    "first_seed": _number,
    "policies": _many(_text),
    "controls": _many(_text),
    "tasks": _many(_task),
}
