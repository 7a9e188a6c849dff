"""Names in a JSON body that no field of its model has, with their paths.

Bodies are decoded into structs that skip such names. Where a strict struct refuses a body, its
levels are decoded again here, one name at a time and only where the model has further fields, so
that the values of unknown names are not built.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import islice
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

import msgspec
from pydantic import BaseModel

MAX_UNKNOWN_NAMES = 16  # that an answer names
_UNKNOWN = "unknown field `"
_NAME = rb'"(?:[^"\\]|\\.)*"\s*:\s*null'
_LATER_NULL = re.compile(rb",\s*" + _NAME + rb"(?=\s*[,}])")
_FIRST_NULL = re.compile(rb"\{\s*" + _NAME + rb"\s*(?:,|(?=\}))")
_STEP = re.compile(r"\[(\d+|\.\.\.)\]")


class BodyPart(BaseModel):
    """Base of objects inside a body.

    `ignored_fields` names undeclared fields that change no answer and that clients send all the
    same, such as what they repeat of an earlier answer; they are not reported.
    """

    ignored_fields: ClassVar[frozenset[str]] = frozenset()


def is_unknown_field(error: msgspec.ValidationError) -> bool:
    """True if a strict struct has refused a name."""
    return _UNKNOWN in str(error)


def error_path(error: str) -> tuple[str, str]:
    """Reason and path of an error of msgspec; the path begins with a dot, or is empty."""
    reason, _, path = error.partition(" - at `$")
    return reason, _STEP.sub(r".\1", path.rstrip("`")).replace("....", "")


def most_strings(content: bytes) -> int:
    """Upper bound of the names and other strings of a JSON text, by their quotation marks: those
    inside strings stand behind a backslash that is not escaped itself."""
    inside = content.count(rb"\"") - content.count(rb'\\"')
    return (content.count(b'"') - inside) // 2


def without_nulls(content: bytes) -> bytes:
    """JSON text without the fields that are null, which are no values."""
    return _FIRST_NULL.sub(b"{", _LATER_NULL.sub(b"", content))


def unknown_paths(raw: msgspec.Raw, annotation: Any, path: str) -> list[str]:
    """Paths of the unknown names in the value of a field, the first 16.

    Args:
        raw: value that matches the annotation but for unknown names.
        path: of the value.
    """
    return list(islice(_unknown(raw, annotation, path), MAX_UNKNOWN_NAMES))


def unknown_names(fields: Any, known: Collection[str], path: str = "") -> list[str]:
    """Paths of the names of an object that are not known, the first 16; none of anything else.
    Null is no value.

    Args:
        fields: object whose values are decoded, or raw.
        path: of the object, empty for a body.
    """
    if not isinstance(fields, dict):
        return []
    surplus = (name for name, value in fields.items() if name not in known and not _is_null(value))
    return [_joined(path, name) for name in islice(surplus, MAX_UNKNOWN_NAMES)]


def members_of(annotation: Any) -> Iterator[Any]:
    """Members of a union without annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from members_of(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from members_of(member)
    else:
        yield annotation


def is_model(annotation: Any) -> bool:
    """True if an annotation is a class of pydantic models."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _unknown(raw: msgspec.Raw, annotation: Any, path: str) -> Iterator[str]:
    start = bytes(memoryview(raw)[:1])
    for member in members_of(annotation):
        if start == b"{" and is_model(member):
            yield from _in_object(raw, member, path)
        elif start == b"[" and get_origin(member) is list:
            [item] = get_args(member)
            for index, each in enumerate(msgspec.json.decode(raw, type=list[msgspec.Raw])):
                yield from _unknown(each, item, f"{path}.{index}")


def _in_object(raw: msgspec.Raw, model: type[BaseModel], path: str) -> Iterator[str]:
    ignored = model.ignored_fields if issubclass(model, BodyPart) else frozenset[str]()
    for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        if name in model.model_fields:
            yield from _unknown(value, model.model_fields[name].annotation, f"{path}.{name}")
        elif name not in ignored and not _is_null(value):
            yield _joined(path, name)


def _is_null(value: Any) -> bool:
    """True for null, decoded or raw."""
    return value is None or (
        isinstance(value, msgspec.Raw) and bytes(memoryview(value)[:1]) == b"n"
    )


def _joined(path: str, name: str) -> str:
    """Path of a name, without halves of surrogate pairs, which UTF-8 cannot hold."""
    return ".".join(filter(None, (path, name))).encode("utf-8", "replace").decode()
