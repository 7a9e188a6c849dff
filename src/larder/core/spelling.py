"""Grammar of policies: parts with parameters, joined by ` > `.

    whole() > protect(sinks=4, recent=32) > snapkv(window=32) > pooled(tokens=512) > drop()

A part is a frozen dataclass with a public name (`larder.core.registry`). Parameters are named; one
that is None is open and is not printed. Parsing the printed form gives the same part.
"""

from __future__ import annotations

import ast
import keyword
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from larder.core.errors import BadParameter, SpellingError, UnknownName
from larder.core.registry import public_name

Value = int | float | str | None

_GUARD = "__"
_FORM = 'parts as name(parameter=value), joined by " > "'
LONGEST_SHOWN = 200  # characters of a sentence that an error quotes
COMPRESSION_RATIO = "compression_ratio"  # parameter of the presses of kvpress
INSTEAD_OF_RATIO = (
    'the share that stays is the budget, 1 - compression_ratio, as in budget="25%" for '
    "compression_ratio=0.75"
)
_CONSTANTS = ("None", "True", "False")
_WORD_OR_TEXT = re.compile(r"""\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[A-Za-z_]\w*""")


@dataclass(frozen=True)
class Call:
    """Parsed part: its name and its parameters. `str()` is its text.

    Args:
        is_bare: True for a name without parentheses.
    """

    name: str
    parameters: dict[str, Value] = field(default_factory=dict[str, Value])
    is_bare: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        inner = ", ".join(f"{name}={_literal(value)}" for name, value in self.parameters.items())
        return self.name if self.is_bare else f"{self.name}({inner})"


def parse(sentence: str, kind: str = "policy") -> list[Call]:
    """Parsed parts of a sentence, in order.

    Args:
        kind: kind of the sentence, for errors.

    Raises:
        SpellingError: the sentence does not parse.
    """
    if not sentence.strip():
        raise SpellingError(f"The {kind} is empty: write a name, or {_FORM}.")
    try:
        tree = ast.parse(_without_keywords(sentence.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpellingError(
            f"The {kind} {_shortened(sentence)!r} does not parse: {_reason(sentence, error)}. "
            f"Write {_FORM}."
        ) from None
    if isinstance(tree, ast.Compare):
        if not all(isinstance(operator, ast.Gt) for operator in tree.ops):
            raise SpellingError(f'In {sentence!r} parts must be joined by " > ".')
        return [_call(node) for node in (tree.left, *tree.comparators)]
    if isinstance(tree, ast.Tuple | ast.BinOp):
        raise SpellingError(f'In {_shortened(sentence)!r} parts must be joined by " > ".')
    return [_call(tree)]


def spell(part: Any) -> str:
    """Canonical text of a part: every parameter that is not None, in the order of its fields."""
    return _spelled(part, [f for f in fields(part) if f.init])


def spell_briefly(part: Any) -> str:
    """Short text of a part: the parameters that are not those by default. Parses to the part."""
    return _spelled(
        part, [f for f in fields(part) if f.init and getattr(part, f.name) != f.default]
    )


def _spelled(part: Any, shown: list[Field[Any]]) -> str:
    values = ((f.name, getattr(part, f.name)) for f in shown)
    inner = ", ".join(f"{name}={_literal(value)}" for name, value in values if value is not None)
    return f"{public_name(part.__class__)}({inner})"


def build(kind: type, parameters: dict[str, Value]) -> Any:
    """Part from parsed parameters.

    Raises:
        UnknownName: the part has no such parameter.
        BadParameter: a value of the wrong type or out of range.
    """
    hints, name = _types(kind), public_name(kind)
    known = [f.name for f in fields(kind) if f.init]
    for parameter in parameters:
        if parameter not in known:
            raise UnknownName(_unknown_parameter(name, parameter, known))
    values = {key: _convert(name, key, value, hints[key]) for key, value in parameters.items()}
    missing = [f.name for f in fields(kind) if _required(f) and f.name not in values]
    if missing:
        raise BadParameter(f"{name} needs {', '.join(missing)}: write {name}({missing[0]}=...).")
    return kind(**values)


@cache
def _types(kind: type) -> Mapping[str, Any]:
    """Types of a part's parameters, by name."""
    return types.MappingProxyType(get_type_hints(kind))


def _call(node: ast.expr) -> Call:
    text = ast.unparse(node).replace(_GUARD, "")
    if isinstance(node, ast.Name):
        return Call(node.id.removesuffix(_GUARD), is_bare=True)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise SpellingError(f"{text!r} is not a part: write name(parameter=value).")
    if node.args or any(named.arg is None for named in node.keywords):
        raise SpellingError(f"In {text!r} every parameter needs its name: name(parameter=value).")
    parameters: dict[str, Value] = {}
    for named in node.keywords:
        if (name := str(named.arg).removesuffix(_GUARD)) in parameters:
            raise SpellingError(f"In {text!r} the parameter {name} is given twice.")
        parameters[name] = _value(text, named.value)
    return Call(node.func.id.removesuffix(_GUARD), parameters)


def _without_keywords(sentence: str) -> str:
    """Sentence with Python keywords escaped, since `global` is the name of a part."""

    def guarded(match: re.Match[str]) -> str:
        word = match[0]
        return word + _GUARD if keyword.iskeyword(word) and word not in _CONSTANTS else word

    return _WORD_OR_TEXT.sub(guarded, sentence)


def _value(text: str, node: ast.expr) -> Value:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        written = ast.unparse(node).replace(_GUARD, "")
        raise SpellingError(
            f'In {text!r} {written} is not a value: write a number or a "text" in quotes.'
        ) from None
    if isinstance(value, bool) or not isinstance(value, int | float | str | None):
        raise SpellingError(f"In {text!r} {value!r} is not a number or a text in quotes.")
    return value


def _literal(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return '"' + "".join(_escaped(letter) for letter in value) + '"'
    return repr(value)


def _escaped(letter: str) -> str:
    if letter == '"':
        return '\\"'
    plain = letter.isprintable() and letter != "\\"
    return letter if plain else letter.encode("unicode_escape").decode("ascii")


def _shortened(sentence: str, longest: int = LONGEST_SHOWN) -> str:
    return sentence if len(sentence) <= longest else sentence[:longest] + "..."


def _reason(sentence: str, error: BaseException) -> str:
    """Reason why a sentence does not parse, and where."""
    if not isinstance(error, SyntaxError) or len(sentence) > LONGEST_SHOWN:
        return str(error.args[0]) if error.args else "it is nested too deeply"
    num_open = sentence.count("(") - sentence.count(")")
    if num_open:
        sign, verb = ("(", "closed") if num_open > 0 else (")", "opened")
        return f"a {sign!r} is never {verb}"
    offset = (error.offset or 0) - 1
    rest = _without_keywords(sentence.strip())[offset:].replace(_GUARD, "") if offset >= 0 else ""
    return f"it goes wrong at {_shortened(rest, 20)!r}" if rest else "it ends too early"


def _required(f: Any) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _unknown_parameter(name: str, parameter: str, known_names: list[str]) -> str:
    if parameter == COMPRESSION_RATIO:
        return f"{name} has no parameter {parameter!r}: {INSTEAD_OF_RATIO}."
    near = get_close_matches(parameter, known_names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    taken = ", ".join(known_names) or "none"
    return f"{name} has no parameter {parameter!r}.{hint} It takes: {taken}."


def _convert(name: str, key: str, value: Value, hint: Any) -> Any:
    union = get_origin(hint) in (types.UnionType, Union)
    for option in get_args(hint) if union else (hint,):
        if option is type(None) and value is None:
            return None
        if _is_enum(option):
            if (member := _member(value, option)) is not None:
                return member
            continue
        if option is float and isinstance(value, int) and not (union and int in get_args(hint)):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    raise BadParameter(f"{name}.{key} must be {_describe(hint)}, got {value!r}.")


def _is_enum(option: Any) -> TypeGuard[type[Enum]]:
    return isinstance(option, type) and issubclass(option, Enum)


def _member(value: Value, kind: type[Enum]) -> Enum | None:
    return next((member for member in kind if member.value == value), None)


def _describe(hint: Any) -> str:
    return " or ".join(_described(option) for option in get_args(hint) or (hint,))


def _described(option: Any) -> str:
    if _is_enum(option):
        return "one of " + ", ".join(repr(member.value) for member in option)
    words = {int: "a whole number", float: "a number", str: 'a "text"', type(None): "left out"}
    return words.get(option, str(option))
