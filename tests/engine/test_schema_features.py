"""41 schemas with a feature each: answers are valid under jsonschema, or the schema is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import product
from pathlib import Path
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
SCHEMAS = json.loads(Path(__file__).with_name("schema_features.json").read_text())
ENFORCED: dict[str, dict[str, Any]] = SCHEMAS["enforced"]
REFUSED: dict[str, dict[str, Any]] = SCHEMAS["refused"]


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
def test_generated_answers_are_valid_under_jsonschema(
    compiler: ConstraintCompiler, name: str
) -> None:
    schema = ENFORCED[name]
    kind = validator_for(schema, Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    texts = [text for seed in range(6) if (text := drawn(compiler, schema, seed)) is not None]
    assert texts
    for text in texts:
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", REFUSED)
def test_unenforceable_schemas_are_refused(name: str) -> None:
    with pytest.raises(BadParameter, match="cannot be enforced"):
        json_constraint(REFUSED[name])


def days(years: Iterable[int]) -> Iterator[tuple[str, bool]]:
    """Dates of some years, and whether there is such a day."""
    for year, month, day in product(years, range(14), range(33)):
        text = f"{year:04}-{month:02}-{day:02}"
        try:
            yield text, bool(date.fromisoformat(text))
        except ValueError:
            yield text, False


def test_date_format_accepts_existing_days_only() -> None:
    grammar = json.loads(json_constraint({"type": "string", "format": "date"}).grammar)
    pattern = re.compile(grammar["grammars"][0]["json_schema"]["pattern"])
    found = list(days((0, 1, 4, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 9999)))
    assert all(bool(pattern.fullmatch(text)) is is_day for text, is_day in found)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("2024-02-29", True),
        ("2023-02-29", False),
        ("2024-04-31", False),
        ("2024-02-29T23:59:59.5+01:00", True),
        ("2023-02-29T00:00:00Z", False),
        ("2024-02-29T24:00:00Z", False),
    ],
)
@pytest.mark.parametrize("kind", ["string", ["string", "null"]])
def test_date_format_is_enforced(
    compiler: ConstraintCompiler, kind: str | list[str], text: str, is_valid: bool
) -> None:
    name = "date-time" if "T" in text else "date"
    matcher = compiler.matcher(json_constraint({"type": kind, "format": name}))
    tokens = [*map(ord, f'"{text}"')]
    if is_valid:
        for token in tokens:
            matcher.accept(token)
        assert matcher.is_complete
        return
    with pytest.raises(BadParameter):
        for token in tokens:
            matcher.accept(token)
