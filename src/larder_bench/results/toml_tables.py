"""Tables in TOML as dataclasses, converted by msgspec; errors name the file and the key."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from larder.core import UnknownName, UsageError, unknown_name_message

Converted = TypeVar("Converted")


def convert_table(table: Any, kind: type[Converted], where: str) -> Converted:
    """Dataclass with the values of a table; a single value stands for a list of one.

    Args:
        where: file or place of the table, as named in errors.

    Raises:
        UnknownName: the table has a key that is not a field of the dataclass.
        UsageError: the table lacks a key, or a value has another type than its field.
    """
    values = _with_lists(table, kind, where)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}. $ is the whole table: correct that key.") from error


def _with_lists(value: Any, kind: Any, where: str) -> Any:
    """Value with a list wherever `kind` expects a tuple, its keys checked."""
    if get_origin(kind) is UnionType:
        kind = next((one for one in get_args(kind) if is_dataclass(one)), kind)
    if get_origin(kind) is tuple:
        values = value if isinstance(value, list) else [value]
        return [_with_lists(one, get_args(kind)[0], where) for one in values]
    if not is_dataclass(kind) or not isinstance(value, dict):
        return value
    fields = get_type_hints(kind)
    for key in value:
        if key not in fields:
            raise UnknownName(f"{where}: {unknown_name_message('key', key, list(fields))}")
    return {key: _with_lists(each, fields[key], f"{where}: {key}") for key, each in value.items()}
