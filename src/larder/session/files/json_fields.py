"""Typed fields of parsed JSON, with errors that name their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from larder.core.errors import InputError

Fields = Mapping[str, object]


def fields_of(value: object, location: str) -> Fields:
    """Return `value` if it is a JSON object.

    Raises:
        InputError: `value` has another type.
    """
    if not isinstance(value, dict):
        raise InputError(f"{location} must be an object {{...}}, got {json_type_name(value)}.")
    return cast(Fields, value)


def list_of(value: object, location: str) -> list[object]:
    """Return `value` if it is a JSON list.

    Raises:
        InputError: `value` has another type.
    """
    if not isinstance(value, list):
        raise InputError(f"{location} must be a list [...], got {json_type_name(value)}.")
    return cast(list[object], value)


def text_of(fields: Fields, key: str, location: str) -> str:
    """Return the text under `key`.

    Raises:
        InputError: the text is missing or blank, or not a text.
    """
    if key not in fields:
        raise InputError(f"{location} has no {key!r}: give it one, a text.")
    value = fields[key]
    if not isinstance(value, str):
        raise InputError(f"{location}: {key!r} must be a text, got {json_type_name(value)}.")
    if not value.strip():
        raise InputError(f"{location}: {key!r} is blank: fill it in, or remove the entry.")
    return valid_unicode(value, f"{location}: {key!r}")


def text_or_number_of(fields: Fields, key: str, location: str) -> str:
    """Return the text or number under `key` as text; empty if it is missing."""
    value = fields.get(key, "")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(
            f"{location}: {key!r} must be a text or a number, got {json_type_name(value)}."
        )
    return valid_unicode(str(value), f"{location}: {key!r}")


def valid_unicode(text: str, location: str) -> str:
    """Return `text` if it has no lone surrogate, which JSON can express and no tokenizer takes."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError(f"{location} holds half a surrogate pair: write the whole character.")
    return text


def json_type_name(value: object) -> str:
    """JSON type of `value` for error messages, with the value if it is short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "a text"
    return f"the number {value}"
