"""JSON requests, decoded into no more than their models have fields for.

A JSON parser builds whatever a client sends, and a model then drops most of it: 64 MiB of `{}` in
an unknown field take gigabytes on the way. Here the containers of a model's fields are a schema
for msgspec. It skips unknown fields without building them and stops at the first value of another
shape; the model then checks the values.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import msgspec
from pydantic import BaseModel, ValidationError

from larder.server.http.error_responses import invalid_field, malformed_field

Scalar = str | int | float | bool | None
MISSING_FIELD = msgspec.Raw(b"")
CONTAINERS = (dict, list, tuple, msgspec.Struct)
MAX_PARTS = 40_000  # in a field: what comes behind the decoder looks at each of them
MAX_ITEMS = 1 << 20  # of a list
MAPPING_BYTES = 1 << 20  # of a field whose names are free: each is stored and hashed
SMALL_BYTES = 256  # of a value that is compared with a few constants
PATH_STEP = re.compile(r"\[(\d+|\.\.\.)\]")
Model = TypeVar("Model", bound="JsonBody")


class JsonBody(BaseModel):
    """A request's JSON.

    `extra_fields` are names of fields that the model does not have and still gets, as
    `model_extra`, where its configuration allows that.
    """

    extra_fields: ClassVar[frozenset[str]] = frozenset()


def decode_body(model: type[Model], content: bytes) -> Model | None:
    """The model that a request's JSON describes; None for `null`.

    Raises:
        Refusal: 400: this is no JSON, none of this model, or has more parts than any request.
    """
    if content.strip() == b"null":
        return None
    fields = _fields(model, content)
    try:
        return model.model_validate(fields, from_attributes=True)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_context=False, include_input=False)
    del fields  # else the refusal would keep them, and as its cause the error likewise
    raise malformed_field(first["loc"], first["msg"])


def _fields(model: type[JsonBody], content: bytes) -> dict[str, Any]:
    """The fields of a model, decoded as far as the model looks at them."""
    try:
        told = msgspec.json.decode(content, type=_top(model))
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise invalid_field(
            f"The body is no JSON object, or holds what is no text ({error})."
        ) from error
    found = {
        name: raw for name, raw in msgspec.structs.asdict(told).items() if raw is not MISSING_FIELD
    }
    return {
        name: _extra(raw) if name in model.extra_fields else _value(model, name, raw)
        for name, raw in found.items()
    }


def _extra(raw: msgspec.Raw) -> Any:
    """A small value; larger ones as they are, because they equal no constant."""
    return msgspec.json.decode(raw) if len(raw) <= SMALL_BYTES else raw


def _value(model: type[JsonBody], name: str, raw: msgspec.Raw) -> Any:
    """A field's value in the first of its shapes that it has."""
    why = ""
    for shape in _shapes_of(model, name):
        if get_origin(shape) is dict and len(raw) > MAPPING_BYTES:
            raise invalid_field(
                f"{name} has more than {MAPPING_BYTES} bytes: send fewer names.", name
            )
        try:
            value = _decode_without_gc(raw, shape)
        except (ValueError, RecursionError) as error:
            why = str(error)
        else:
            if isinstance(value, list) and len(value) > MAX_ITEMS:
                raise invalid_field(f"{name} has more than {MAX_ITEMS} items.", name)
            if _has_more_parts(value, MAX_PARTS):
                raise invalid_field(f"{name} has more than {MAX_PARTS} fields and lists.", name)
            return value
    said, _, path = why.partition(" - at `$")  # with the place as the field's path
    steps = PATH_STEP.sub(r".\1", path.rstrip("`")).replace("....", "")
    place = f"{name}{steps}"[:200]
    raise invalid_field(f"{place}: {said}.", place)


def _decode_without_gc(raw: msgspec.Raw, shape: Any) -> Any:
    """A value, decoded without the garbage collector, which would go through all that is made
    again and again while it grows, and find nothing: a decoder makes no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(raw, type=shape)
    finally:
        if was_enabled:
            gc.enable()


def _has_more_parts(value: Any, limit: int) -> bool:
    """Whether a value holds more fields and lists than a limit; no more of them are looked at."""
    waiting, count = [value] if isinstance(value, CONTAINERS) else [], 0
    while waiting and count <= limit:
        found = waiting.pop()
        if isinstance(found, msgspec.Struct):
            found = msgspec.structs.astuple(found)
            count += len(found)
        elif isinstance(found, dict):
            count += len(found)
            found = found.values()
        parts = [each for each in islice(found, limit + 1) if isinstance(each, CONTAINERS)]
        count += len(parts)
        waiting += parts
    return count > limit


@cache
def _top(model: type[JsonBody]) -> type[msgspec.Struct]:
    """A model's fields, each left as it was spelled."""
    names = dict.fromkeys((*model.model_fields, *model.extra_fields))
    return msgspec.defstruct(model.__name__, [(name, msgspec.Raw, MISSING_FIELD) for name in names])


@cache
def _shapes_of(model: type[JsonBody], name: str) -> tuple[Any, ...]:
    return tuple(_shapes(model.model_fields[name].annotation))


def _shapes(annotation: Any) -> Iterator[Any]:
    """The shapes that a value of a type can have, scalars first.

    Scalars are not told apart: whether a number will do is the model's to say.
    """
    members = list(_members(annotation))
    containers = [each for each in map(_container, members) if each is not None]
    if len(containers) < len(members):
        yield Scalar
    yield from dict.fromkeys(containers)


def _members(annotation: Any) -> Iterator[Any]:
    """The members of a union, without what annotates them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _container(annotation: Any) -> Any:
    """The shape of a list, a tuple, a mapping or a model; None of a scalar."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is list:
        return list[_union(inner[0])]
    if origin is tuple:
        return tuple[tuple(_union(each) for each in inner)]
    if origin is dict:
        return dict[str, _union(inner[1])]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = [
            (name, _union(field.annotation))
            if field.is_required()
            else (name, _union(field.annotation), field.get_default())
            for name, field in annotation.model_fields.items()
        ]
        return msgspec.defstruct(annotation.__name__, fields, gc=False)
    return None


def _union(annotation: Any) -> Any:
    """The union of a value's shapes."""
    return Union[tuple(_shapes(annotation))]  # noqa: UP007, of types that are computed
