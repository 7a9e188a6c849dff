"""JSON request bodies, decoded only into the fields of their model.

A plain JSON parser builds everything that a client sends before the model drops it: 64 MiB of `{}`
in an unknown field take gigabytes. Here the containers of a model's fields form a msgspec schema,
which skips unknown fields without building them and stops at the first value of another shape; the
model then validates the values.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, PrivateAttr, ValidationError

from larder.server.api_errors import invalid_request
from larder.server.http.error_responses import field_steps, malformed_field
from larder.server.http.unknown_fields import (
    MAX_UNKNOWN_NAMES,
    BodyPart,
    error_path,
    is_model,
    is_unknown_field,
    members_of,
    most_strings,
    unknown_names,
    unknown_paths,
    without_nulls,
)
from larder.server.request import ApiError
from larder.session.transcript.chat_template import has_mark

Scalar = str | int | float | bool | None
MISSING_FIELD = msgspec.Raw(b"")
CONTAINERS = (dict, list, tuple, msgspec.Struct)
MAX_PARTS = 40_000  # of a field: validation visits each of them
MAX_ITEMS = 1 << 20  # of a list
MAPPING_BYTES = 1 << 20  # of a mapping with arbitrary names: each is stored and hashed
MAX_STRINGS = 200_000  # of a longer body some of whose names are unknown
JSON_FIELD_BYTES = 1 << 18  # of a field that holds any JSON
SMALL_BYTES = 256  # of an extra field, which is only compared with constants
PART_ERRORS = ("literal_error", "value_error")
Model = TypeVar("Model", bound="JsonBody")


def _valid_unicode(text: str) -> str:
    """The text. Raise ValueError if it has a lone surrogate, which JSON can escape, or U+FDD0,
    which marks images."""
    if not text.isascii():
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ValueError("it contains half of a surrogate pair, which is not text")
        if has_mark(text):
            raise ValueError("it contains U+FDD0, which is no character")
    return text


Text = Annotated[str, AfterValidator(_valid_unicode)]


def _decoded_object(raw: Any) -> Any:
    """Decoded JSON object. Raise ValueError if it is too long, or no JSON object."""
    if not isinstance(raw, msgspec.Raw):
        return raw
    if len(raw) > JSON_FIELD_BYTES:
        raise ValueError(f"it has more than {JSON_FIELD_BYTES} bytes")
    value = msgspec.json.decode(raw)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


# JSON object in a part of a field, decoded once its part is validated.
JsonObject = Annotated[Any, BeforeValidator(_decoded_object)]


class JsonBody(BaseModel):
    """Base of request bodies.

    `extra_fields` names undeclared fields that are passed to the model as `model_extra`, where its
    configuration allows that; `json_fields` those that hold any JSON, up to `JSON_FIELD_BYTES`.
    """

    extra_fields: ClassVar[frozenset[str]] = frozenset()
    json_fields: ClassVar[frozenset[str]] = frozenset()
    _unknown_fields: tuple[str, ...] = PrivateAttr(())

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Paths of the first 16 unknown fields of a body that are not null."""
        return self._unknown_fields

    def note_unknown_fields(self, names: Iterable[str]) -> None:
        """Record the names in the body that are no fields."""
        self._unknown_fields = tuple(islice(names, MAX_UNKNOWN_NAMES))


def decode_body(model: type[Model], content: bytes) -> Model | None:
    """Model instance decoded from JSON; None for `null`.

    Raises:
        ApiError: 400: the content is not JSON, does not match the model, or has too many parts.
    """
    if content.strip() == b"null":
        return None
    fields, unknown = _fields(model, content)
    try:
        decoded = model.model_validate(fields, from_attributes=True)
        decoded.note_unknown_fields(unknown)
        return decoded
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    del fields  # else the traceback of the error would keep them alive
    first = max(found, key=_weight)
    raise malformed_field(first["loc"], first["msg"])


def _weight(error: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """Order of the errors of a value that has several shapes. One of the right shape is refused by
    one of its parts, for its length, or deeper than others."""
    kind = error["type"]
    is_other_shape = kind.endswith(("_type", "_parsing"))
    return kind in PART_ERRORS, not is_other_shape, len(field_steps(error["loc"]))


def _fields(model: type[JsonBody], content: bytes) -> tuple[dict[str, Any], list[str]]:
    """Fields of a model, decoded as far as the model reads them, and names of no field."""
    top, unknown = _top(model), list[str]()
    try:
        try:
            decoded = msgspec.json.decode(content, type=_strict_top(model))
        except msgspec.ValidationError:
            decoded = msgspec.json.decode(content, type=top)
            unknown = _unknown_names(model, content)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise invalid_request(f"The body is not a JSON object of valid text ({error}).") from error
    present = {
        name: raw
        for name, raw in msgspec.structs.asdict(decoded).items()
        if raw is not MISSING_FIELD
    }
    return {
        name: _value(model, name, raw, unknown) if name in model.model_fields else _extra(raw)
        for name, raw in present.items()
    }, unknown


def _unknown_names(model: type[JsonBody], content: bytes) -> list[str]:
    """Names in a body that are no fields of its model."""
    if _has_many_strings(content):
        try:
            msgspec.json.decode(without_nulls(content), type=_strict_top(model))
        except msgspec.ValidationError:
            raise _too_many_strings() from None
        return []
    names = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    return unknown_names(names, _top(model).__struct_fields__)


def _has_many_strings(content: bytes) -> bool:
    """True if there may be too many names to store each of them, to find those that are unknown."""
    return len(content) > MAPPING_BYTES and most_strings(content) > MAX_STRINGS


def _too_many_strings() -> ApiError:
    """The refusal of a body with unknown names among so many others."""
    return invalid_request(
        f"The body has more than {MAX_STRINGS} names and other strings, and an unknown field: "
        "leave it out."
    )


def _extra(raw: msgspec.Raw) -> Any:
    """Decoded value if small; larger ones stay raw, because they equal no constant."""
    return msgspec.json.decode(raw) if len(raw) <= SMALL_BYTES else raw


def _value(model: type[JsonBody], name: str, raw: msgspec.Raw, unknown: list[str]) -> Any:
    """Value of a field, decoded as the first of its shapes that matches.

    Args:
        unknown: takes the paths of names in the value that are no fields.
    """
    why = ""
    is_json = name in model.json_fields
    if is_json and len(raw) > JSON_FIELD_BYTES:
        raise invalid_request(f"{name} has more than {JSON_FIELD_BYTES} bytes.", name)
    for shape in (_ANY_JSON,) if is_json else _shapes_of(model, name):
        if get_origin(shape.lax) is dict and len(raw) > MAPPING_BYTES:
            raise invalid_request(
                f"{name} has more than {MAPPING_BYTES} bytes: send fewer names.", name
            )
        try:
            value, has_unknown = shape.decode(raw)
        except (ValueError, RecursionError) as error:
            why = str(error)
            continue
        if isinstance(value, list) and len(value) > MAX_ITEMS:
            raise invalid_request(f"{name} has more than {MAX_ITEMS} items.", name)
        if _has_more_parts(value, MAX_PARTS):
            raise invalid_request(f"{name} has more than {MAX_PARTS} fields and lists.", name)
        if has_unknown and _has_many_strings(content := bytes(raw)):
            if shape.decode(msgspec.Raw(without_nulls(content)))[1]:
                raise _too_many_strings()
        elif has_unknown:
            unknown += unknown_paths(raw, model.model_fields[name].annotation, name)
        return value
    reason, steps = error_path(why)  # the path of the field follows
    location = f"{name}{steps}"[:200]
    raise invalid_request(f"{location}: {reason}.", location)


class Unknown(Enum):
    """Handling of unknown fields of an object."""

    SKIPPED = "skipped"
    REFUSED = "refused"


@dataclass(frozen=True)
class _Shape:
    """Types of one shape of a value: one that skips unknown names, one that refuses them."""

    lax: Any
    strict: Any

    def decode(self, raw: msgspec.Raw) -> tuple[Any, bool]:
        """Value, and whether it has unknown names."""
        try:
            return _decode_without_gc(raw, self.strict), False
        except msgspec.ValidationError as error:
            if not is_unknown_field(error):
                raise
            return _decode_without_gc(raw, self.lax), True


_ANY_JSON = _Shape(Any, Any)


def _decode_without_gc(raw: msgspec.Raw, shape: Any) -> Any:
    """Value decoded with the garbage collector disabled: a decoder creates no cycles, and repeated
    collections of the growing value would be wasted."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(raw, type=shape)
    finally:
        if was_enabled:
            gc.enable()


def _has_more_parts(value: Any, limit: int) -> bool:
    """True if a value has more fields and lists than a limit; stops counting there."""
    waiting, count = [value] if isinstance(value, CONTAINERS) else [], 0
    while waiting and count <= limit:
        present = waiting.pop()
        if isinstance(present, msgspec.Struct):
            given = msgspec.structs.astuple(present)
            present = [each for each in given if each is not None and each is not MISSING_FIELD]
            count += len(present)
        elif isinstance(present, dict):
            count += len(present)
            present = present.values()
        parts = [each for each in islice(present, limit + 1) if isinstance(each, CONTAINERS)]
        count += len(parts)
        waiting += parts
    return count > limit


@cache
def _top(model: type[JsonBody]) -> type[msgspec.Struct]:
    """Struct with the fields of a model as raw JSON."""
    names = dict.fromkeys((*model.model_fields, *model.extra_fields))
    fields = [(name, msgspec.Raw, MISSING_FIELD) for name in names]
    return _resolved(msgspec.defstruct(model.__name__, fields))


@cache
def _strict_top(model: type[JsonBody]) -> type[msgspec.Struct]:
    """Variant of a struct that rejects unknown fields."""
    bases = (_top(model),)
    return _resolved(msgspec.defstruct(model.__name__, [], bases=bases, forbid_unknown_fields=True))


@cache
def _shapes_of(model: type[JsonBody], name: str) -> tuple[_Shape, ...]:
    annotation = model.model_fields[name].annotation
    pairs = zip(
        _shapes(annotation, Unknown.SKIPPED), _shapes(annotation, Unknown.REFUSED), strict=True
    )
    return tuple(_Shape(_resolved(lax), _resolved(strict)) for lax, strict in pairs)


def _resolved(shape: Any) -> Any:
    """A shape whose fields msgspec has looked up in the thread that has made it: it crashes where
    two threads are the first to decode a struct."""
    msgspec.json.Decoder(shape)
    return shape


def _shapes(annotation: Any, unknown: Unknown) -> Iterator[Any]:
    """Shapes of the values of a type, scalars first.

    All scalars are one shape: the model validates their type.

    Args:
        unknown: what becomes of unknown names in objects.
    """
    members = list(members_of(annotation))
    containers = [found for each in members if (found := _container(each, unknown)) is not None]
    if len(containers) < len(members):
        yield Scalar
    yield from dict.fromkeys(containers)


def _container(annotation: Any, unknown: Unknown) -> Any:
    """Shape of a list, tuple, mapping or model; None for a scalar. Any JSON stays undecoded."""
    if annotation is Any:
        return msgspec.Raw
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is list:
        return list[_union(inner[0], unknown)]
    if origin is tuple:
        return tuple[tuple(_union(each, unknown) for each in inner)]
    if origin is dict:
        return dict[str, _union(inner[1], unknown)]
    return _struct(annotation, unknown) if is_model(annotation) else None


def _struct(model: type[BaseModel], unknown: Unknown) -> type[msgspec.Struct]:
    """Struct with the fields of a model inside a body."""
    fields = [
        (name, _union(field.annotation, unknown))
        if field.is_required()
        else (name, _union(field.annotation, unknown), field.get_default())
        for name, field in model.model_fields.items()
    ]
    if unknown is Unknown.REFUSED and issubclass(model, BodyPart):
        fields += [(name, msgspec.Raw, MISSING_FIELD) for name in sorted(model.ignored_fields)]
    is_strict = unknown is Unknown.REFUSED or model.model_config.get("extra") == "forbid"
    return msgspec.defstruct(
        model.__name__, fields, gc=False, kw_only=True, forbid_unknown_fields=is_strict
    )


def _union(annotation: Any, unknown: Unknown) -> Any:
    """Union of the shapes of a type."""
    return Union[tuple(_shapes(annotation, unknown))]  # noqa: UP007, computed types
