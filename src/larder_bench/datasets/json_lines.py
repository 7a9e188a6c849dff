"""Readers of public data sets in folders: a JSON object per line, or a list of objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from larder.core import InputError
from larder_bench.datasets.sources import TaskSources

Fields = dict[str, Any]


def load_sample(folder: str, name: str, seed: int, sources: TaskSources) -> Fields:
    """Sample of `FOLDER/NAME.jsonl`, or of `FOLDER/data/NAME.jsonl`; seeds select samples in
    turn.

    Raises:
        UsageError: the folder was not given.
        InputError: the file does not exist, or cannot be read.
    """
    directory = sources.folder(folder)
    paths = sorted([*directory.glob("*.jsonl"), *directory.glob("data/*.jsonl")])
    known = {path.stem: path for path in paths}
    if name not in known:
        names = ", ".join(sorted(known)) or "no .jsonl file at all"
        raise InputError(f"{directory} holds no {name}.jsonl: it holds {names}.")
    samples = sources.once(known[name], read_lines)
    return samples[seed % len(samples)]


def read_lines(path: Path) -> list[Fields]:
    """All objects of a file with one per line.

    Raises:
        InputError: the file cannot be read, is empty, or a line is not an object.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        content = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as lines of JSON: {error}.") from error
    return _objects(content, path)


def read_list(path: Path) -> list[Fields]:
    """All objects of a file that contains a list of them.

    Raises:
        InputError: the file cannot be read, is empty, or is not such a list.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}.") from error
    return _objects(content if isinstance(content, list) else [content], path)


def required_field(fields: Fields, name: str, location: str) -> Any:
    """Value of a sample's field.

    Raises:
        InputError: the sample does not have the field.
    """
    if name not in fields:
        raise InputError(f"a sample of {location} has no {name!r}: is it of another release?")
    return fields[name]


def _objects(content: list[Any], path: Path) -> list[Fields]:
    if not content:
        raise InputError(f"{path} is empty: name another folder.")
    for number, each in enumerate(content, start=1):
        if not isinstance(each, dict):
            raise InputError(f"{path}: entry {number} must be an object {{...}}.")
    return content
