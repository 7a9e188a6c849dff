"""Values of a file in TOML, each of the kind that its key takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from larder.core.errors import UnknownName, UsageError
from larder.core.family import unknown_name_message

ValueReader = Callable[[Any, str], Any]  # a value and where it stands


def read_text_value(value: Any, where: str) -> str:
    """Raises: UsageError: it is no text."""
    if not isinstance(value, str):
        raise UsageError(f"{where} must be a text in quotes, got {value!r}.")
    return value


def read_integer(value: Any, where: str) -> int:
    """Raises: UsageError: it is no whole number."""
    if type(value) is not int:
        raise UsageError(f"{where} must be a whole number, got {value!r}.")
    return value


def read_number_or_text(value: Any, where: str) -> float | int | str:
    """Raises: UsageError: it is neither a finite number nor a text."""
    if type(value) not in (int, float, str) or value in (inf, -inf) or value != value:
        raise UsageError(f"{where} must be a finite number, or a text in quotes, got {value!r}.")
    return value


def list_reader(one: ValueReader) -> ValueReader:
    """Reads one value or a list of them."""

    def read(value: Any, where: str) -> tuple[Any, ...]:
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        return tuple(one(each, where) for each in values)

    return read


def read_table(
    value: Any, where: str, what: str, readers: Mapping[str, ValueReader], needed: Sequence[str]
) -> dict[str, Any]:
    """The values of a table by their keys.

    Args:
        what: the table is called where a key of it is refused.
        readers: for each key that it may have.
        needed: keys that it must have.

    Raises:
        UnknownName: it has another key.
        UsageError: it is no table, lacks a key, or a value is not what its key takes.
    """
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a table of keys and values, got {value!r}.")
    values: dict[str, Any] = {}
    for key, own in value.items():
        if key not in readers:
            raise UnknownName(
                f"{where}: {unknown_name_message(f'key of {what}', key, list(readers))}"
            )
        values[key] = readers[key](own, f"{where}: {key}")
    if missing := [key for key in needed if key not in values]:
        raise UsageError(f"{where} needs {' and '.join(missing)}.")
    return values
