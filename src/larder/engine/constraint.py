"""Constrained decoding by llguidance: answers that match a JSON schema, a pattern or a grammar.

llguidance (Moskal et al., github.com/guidance-ai/llguidance) keeps a parser beside the answer and
says which tokens may come next. A schema that it cannot express is refused, never approximated,
unless the caller sets `lenient`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from larder.core.errors import BadParameter, DependencyError

CACHED_GRAMMARS = 64
MAX_GRAMMAR_CHARS = 1 << 18
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
CONSTANTS = ("const", "enum", "default", "examples")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# Days that there are (RFC 3339, section 5.7): llguidance's own pattern takes February 31. Year 0,
# which Python and JavaScript's calendars do not share, is left out.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTHS = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"T{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
CALENDAR_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}{_TIME}$"}


@dataclass(frozen=True)
class Constraint:
    """Grammar that an answer must match.

    Args:
        grammar: grammar in the form of llguidance; `json_constraint` and others make it.
        warnings: what of a lenient schema is not enforced.
    """

    grammar: str
    warnings: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the grammar."""
        return hashlib.sha256(self.grammar.encode("utf-8", "replace")).hexdigest()


SchemaLike = Mapping[str, Any] | type  # a JSON schema, or the class of a pydantic model


def schema_constraint(schema: SchemaLike) -> Constraint:
    """Constraint to JSON of a schema, or of a pydantic model without fields that it does not name.

    Raises:
        BadParameter, DependencyError: as for `json_constraint`.
    """
    if isinstance(schema, Mapping):
        return json_constraint(schema)
    _check_installed()
    from pydantic import BaseModel

    if not issubclass(schema, BaseModel):
        raise BadParameter(
            f"schema must be a JSON schema or the class of a pydantic model, got {schema.__name__}."
        )
    return json_constraint(_rewritten(schema.model_json_schema(), _closed))


def json_constraint(schema: Mapping[str, Any] | bool, lenient: bool = False) -> Constraint:
    """Constraint to JSON that a schema describes, without white space between values.

    Args:
        schema: a JSON schema; `ANY_OBJECT` for any object.
        lenient: leave out what llguidance cannot express, and name it in `warnings`.

    Raises:
        BadParameter: the schema is too long, not valid, or cannot be expressed.
        DependencyError: llguidance is not installed.
    """
    _check_installed()
    from llguidance import LLMatcher

    options: Any = {"whitespace_flexible": False, "lenient": lenient}
    try:
        text = json.dumps(_rewritten(schema, _prepared))
    except RecursionError as error:
        raise BadParameter("A schema must not nest hundreds of levels: flatten it.") from error
    _check_length(text)
    return _checked(LLMatcher.grammar_from_json_schema(text, overrides=options))


def regex_constraint(pattern: str) -> Constraint:
    """Constraint to a regular expression of the whole answer, without look-around.

    Raises:
        BadParameter, DependencyError: as for `json_constraint`.
    """
    _check_installed()
    from llguidance import LLMatcher

    _check_length(pattern)
    return _checked(LLMatcher.grammar_from_regex(pattern))


def grammar_constraint(grammar: str) -> Constraint:
    """Constraint to a grammar in Lark's notation, as llguidance reads it.

    Raises:
        BadParameter, DependencyError: as for `json_constraint`.
    """
    _check_installed()
    from llguidance import LLMatcher

    _check_length(grammar)
    return _checked(LLMatcher.grammar_from_lark(grammar))


def choice_constraint(choices: Sequence[str]) -> Constraint:
    """Constraint to one of several texts.

    Raises:
        BadParameter, DependencyError: as for `json_constraint`.
    """
    if not choices:
        raise BadParameter("There are no choices: give at least one text.")
    texts = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return grammar_constraint(f"start: {' | '.join(texts)}")


class ConstraintCompiler:
    """Compiled constraints of one tokenizer, the latest of them cached. Safe from any thread.

    Constraints are compiled one at a time; those that are cached need not wait for it.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: number of logits.
        stop_ids: token ids that end an answer, allowed where the constraint is met.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, stop_ids
        self._lock, self._compiling, self._words = threading.Lock(), threading.Lock(), None
        self._matchers: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, constraint: Constraint) -> ConstraintMatcher:
        """Matcher of a new answer; compiled once per grammar, in up to a second.

        Raises:
            BadParameter: the grammar cannot be compiled within its limits.
        """
        digest = constraint.digest
        found = self._cached(digest)
        if found is None:
            with self._compiling:
                found = self._cached(digest)  # compiled by another thread meanwhile
                if found is None:
                    self._cache(digest, self._compiled(constraint))
                    found = self._cached(digest)
        assert found is not None
        return found

    def _cached(self, digest: str) -> ConstraintMatcher | None:
        with self._lock:
            if digest not in self._matchers:
                return None
            self._matchers.move_to_end(digest)
            return ConstraintMatcher(self._matchers[digest].deep_copy())

    def _cache(self, digest: str, compiled: Any) -> None:
        with self._lock:
            self._matchers[digest] = compiled
            if len(self._matchers) > CACHED_GRAMMARS:
                self._matchers.popitem(last=False)

    def _compiled(self, constraint: Constraint) -> Any:
        _check_installed()
        from llguidance import LLMatcher, LLTokenizer
        from tokenizers import Tokenizer

        if self._words is None:
            plain = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
            plain.no_padding()
            plain.no_truncation()
            stops = sorted(self._stop_ids)
            try:
                self._words = LLTokenizer(plain.to_str(), self._vocab_size, stops)
            except ValueError as error:
                raise BadParameter(
                    f"The tokenizer of this model cannot enforce a schema, pattern or grammar "
                    f"({error}): leave it out, or take a model with byte-level tokens."
                ) from error
        matcher = LLMatcher(self._words, constraint.grammar, log_level=0)
        if matcher.is_error():
            raise BadParameter(_message(matcher.get_error()))
        return matcher


class ConstraintMatcher:
    """Parser of one answer: which tokens may come next."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """True if nothing may follow, so that the answer ends without a stop token."""
        return self._matcher.is_stopped()

    def masked(self, logits: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """Logits with -inf for all tokens that may not come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)
        mask = torch.zeros(len(logits), dtype=torch.bool)
        mask[: len(allowed)] = torch.from_numpy(allowed)
        return logits.masked_fill(~mask.to(logits.device), -torch.inf)

    def forced(self) -> list[int]:
        """Next tokens that `masked` would allow alone, one after the other; empty if there is a
        choice."""
        return self._matcher.compute_ff_tokens()

    def accept(self, token: int) -> None:
        """Continue with the token that was chosen.

        Raises:
            BadParameter: the parser reached one of its limits.
        """
        if not self._matcher.consume_token(token):
            raise BadParameter(_message(self._matcher.get_error()))


def _check_installed() -> None:
    if find_spec("llguidance") is None:
        raise DependencyError(
            "Answers by schema, pattern or grammar need llguidance: pip install "
            "'larder[structured]'."
        )


def _check_length(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise BadParameter(
            f"A schema, pattern or grammar must have at most {MAX_GRAMMAR_CHARS} characters, got "
            f"{len(text)}."
        )


def _checked(grammar: str) -> Constraint:
    """The constraint. Raise BadParameter if llguidance cannot express the grammar."""
    from llguidance import LLMatcher

    _check_length(grammar)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise BadParameter(_message(" ".join(messages)))
    return Constraint(grammar, tuple(messages))


def _message(reason: str) -> str:
    text = " ".join(reason.split())[:300]
    return (
        f"The schema, pattern or grammar cannot be enforced ({text}): leave that part out, or "
        "correct it."
    )


def _rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Schema with `change` applied to every subschema, innermost first; property names and
    constants are left as they are."""
    if isinstance(schema, list):
        return [_rewritten(each, change) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in CONSTANTS:
            found[key] = value
        elif key in NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: _rewritten(each, change) for name, each in value.items()}
        else:
            found[key] = _rewritten(value, change)
    return change(found)


def _prepared(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema in the terms of llguidance: without a `propertyNames` that only requires strings, and
    with a pattern of existing days in place of a date format."""
    if schema.get("propertyNames") == {"type": "string"}:
        del schema["propertyNames"]
    pattern = CALENDAR_PATTERNS.get(str(schema.get("format")))
    if pattern is None or "pattern" in schema:
        return schema
    return {name: each for name, each in schema.items() if name != "format"} | {"pattern": pattern}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema whose objects have no properties beside the named ones, unless it allows others."""
    return {"additionalProperties": False, **schema} if "properties" in schema else schema
