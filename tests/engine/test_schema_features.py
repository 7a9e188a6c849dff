"""41 schemas with a feature each: answers are valid under jsonschema, or the schema is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason="the extra structured is not installed")
pytest.importorskip("jsonschema", reason="schemathesis, which brings it, is not installed")

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from larder.core import BadParameter
from larder.engine import ConstraintCompiler, json_constraint
from server_core import byte_characters

V, END, MOST = 128, 2, 300
STRING, INTEGER = {"type": "string", "maxLength": 4}, {"type": "integer"}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    given = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**given, "required": names}


ENFORCED: dict[str, dict[str, Any]] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer range": {"type": "integer", "minimum": -3, "maximum": 12},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 5},
    "number range": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "longer": {"type": "string", "maxLength": 200},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]+$"},
    "open pattern": {"type": "string", "pattern": "[0-9]", "maxLength": 20},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "enum": {"enum": ["a", 1, None, True, {"b": [2]}]},
    "const": {"const": {"a": [1, "x"]}},
    "types": {"type": ["boolean", "null"]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    "nested arrays": {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2},
    },
    "object": closed(a=STRING, b=INTEGER),
    "optional": closed(["b"], a=STRING, b={"type": "boolean"}),
    "nested objects": closed(a=closed(b=closed(c={"type": "null"}))),
    "other values": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "null"}},
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "null"}, closed(a={"type": "boolean"})]},
    "one of": {"oneOf": [{"const": "a"}, {"type": "boolean"}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 9}]},
    "reference": {"$defs": {"a": {"type": "boolean"}}, **closed(b={"$ref": "#/$defs/a"})},
    "recursion": {
        "$defs": {"node": closed(["v"], v={"type": "null"}, next={"$ref": "#/$defs/node"})},
        "$ref": "#/$defs/node",
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"a": {"type": "null"}},
        **closed(b={"$ref": "#/definitions/a"}),
    },
    "escapes": closed(None, **{'a "b"\\': {"const": 'c "d"\\\n'}}),
}
REFUSED: dict[str, dict[str, Any]] = {
    "unknown format": {"type": "string", "format": "frob"},
    "unique": {"type": "array", "items": INTEGER, "uniqueItems": True},
    "contains": {"type": "array", "contains": INTEGER},
    "names": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependent": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "overlap": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "not": {"type": "object", "not": {"required": ["a"]}},
    "condition": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "look-ahead": {"type": "string", "pattern": "(?=a)b"},
}


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(byte_characters().tokenizer, V, frozenset({END}))


def drawn(compiler: ConstraintCompiler, schema: dict[str, Any], seed: int) -> str | None:
    """An answer of random logits; None if it does not end."""
    matcher, source = compiler.matcher(json_constraint(schema)), torch.Generator().manual_seed(seed)
    signs = list[str]()
    while not matcher.is_complete and len(signs) < MOST:
        logits = torch.randn(V, generator=source)
        logits[[*map(ord, '"}]'), END]] += 3  # so that it ends
        chances = matcher.masked(logits).softmax(-1)
        token = int(torch.multinomial(chances, 1, generator=source))
        if token == END:
            break
        matcher.accept(token)
        signs.append(chr(token))
    return "".join(signs) if len(signs) < MOST else None


@pytest.mark.parametrize("name", ENFORCED)
def test_no_invalid_answer_passes(compiler: ConstraintCompiler, name: str) -> None:
    schema = ENFORCED[name]
    kind = validator_for(schema, Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    texts = [text for seed in range(6) if (text := drawn(compiler, schema, seed)) is not None]
    assert texts
    for text in texts:
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused(name: str) -> None:
    with pytest.raises(BadParameter, match="cannot be enforced"):
        json_constraint(REFUSED[name])
