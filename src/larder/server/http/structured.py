"""Structured outputs: `response_format` of OpenAI and `structured_outputs` of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from larder.core.errors import BadParameter, DependencyError
from larder.engine.constraint import (
    ANY_OBJECT,
    Constraint,
    choice_constraint,
    grammar_constraint,
    json_constraint,
    regex_constraint,
)
from larder.server.api_errors import invalid_request
from larder.server.http.app_state import Unsupported

FORMATS = "text, json_object or json_schema"
FORMAT_FIELDS = ("type", "json_schema")
SCHEMA_FIELDS = ("name", "description", "schema", "strict")
KINDS: Mapping[str, str] = {
    "json": "a JSON schema",
    "json_object": "true",
    "regex": "a text",
    "choice": "a list of texts",
    "grammar": "a text",
}


def answer_constraint(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    name: str = "response_format",
    unsupported: Unsupported = Unsupported.REFUSED,
) -> Constraint | None:
    """Constraint of an answer; None if any text will do. Takes some milliseconds.

    Args:
        name: of the field that holds `response_format`, for errors.
        unsupported: what becomes of parts of schemas that cannot be enforced.

    Raises:
        ApiError: 400 for a field that is malformed, or that cannot be enforced.
    """
    if response_format is not None and structured_outputs is not None:
        raise invalid_request(
            "response_format and structured_outputs exclude each other: send one.",
            "structured_outputs",
        )
    name = name if structured_outputs is None else "structured_outputs"
    try:
        if structured_outputs is not None:
            return _structured(structured_outputs, unsupported)
        return None if response_format is None else _formatted(response_format, unsupported)
    except DependencyError as error:
        raise invalid_request(str(error), name, "unsupported_parameter") from error
    except BadParameter as error:
        raise invalid_request(f"{name}: {error}", name) from error


def _formatted(response_format: Mapping[str, Any], unsupported: Unsupported) -> Constraint | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_constraint(ANY_OBJECT)
    if kind != "json_schema":
        raise BadParameter(f"type must be {FORMATS}, got {str(kind)[:100]!r}.")
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(described, Mapping) or not isinstance(schema, Mapping | bool):
        raise BadParameter("json_schema must have a schema, an object.")
    if described.get("strict") is False or unsupported is Unsupported.IGNORED:
        return json_constraint(schema, lenient=True)
    try:
        return json_constraint(schema)
    except BadParameter as error:
        json_constraint(schema, lenient=True)  # raises where it cannot be left out
        raise BadParameter(f"{error} With strict: false it is left out.") from error


def _structured(structured_outputs: Mapping[str, Any], unsupported: Unsupported) -> Constraint:
    given = {name: value for name, value in structured_outputs.items() if value is not None}
    if len(given) != 1 or not given.keys() <= KINDS.keys():
        names = ", ".join(name[:40] for name in given) or "nothing"
        raise BadParameter(f"exactly one of {', '.join(KINDS)} must be set, got {names}.")
    [(kind, value)] = given.items()
    if kind == "json" and isinstance(value, Mapping | bool):
        return json_constraint(value, lenient=unsupported is Unsupported.IGNORED)
    if kind == "json_object" and value is True:
        return json_constraint(ANY_OBJECT)
    if kind == "regex" and isinstance(value, str):
        return regex_constraint(value)
    if kind == "grammar" and isinstance(value, str):
        return grammar_constraint(value)
    if kind == "choice" and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return choice_constraint(value)
    raise BadParameter(f"{kind} must be {KINDS[kind]}, got {type(value).__name__}.")
