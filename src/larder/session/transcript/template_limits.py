"""How large the values of a chat template may become: what each operation makes at most."""

from __future__ import annotations

import re
from collections.abc import ItemsView, KeysView, Mapping, Sequence, Sized, ValuesView
from types import GeneratorType
from typing import Any

from larder.core.errors import ModelError

LARGEST_ARGUMENT = 10_000  # of a width, an indentation or a count
LARGEST_BITS = 4096  # of an integer
LARGEST_DEPTH = 100  # of lists in lists: hashes and comparisons recurse
MAX_SEARCH_CHARS = 1000  # characters that are sought from the end, which takes a product of lengths
WIDTH = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*\{")  # a field as wide as an attacker likes
FIELD, NUMBER = re.compile(r"[%{]"), re.compile(r"\d+")
# Filters and methods that no chat template needs, whose results or times have no simple bound.
REFUSED_OPERATIONS = frozenset(
    {"encode", "from_bytes", "pprint", "striptags", "to_bytes", "translate", "urlize", "wordwrap"}
    | {"xmlattr"}
)
WIDTH_OPERATIONS = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice"}
)
WIDTH_OPERATIONS |= {"tojson", "zfill"}
REVERSE_SEARCHES = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
PARAMETERS = {"replace": ("old", "new"), "join": ("d",)}
COLLECTIONS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def output_size_bound(limit: int, name: str, value: Any = "", /, *args: Any, **named: Any) -> int:
    """Characters that an operation makes at most; more than the limit where that has no bound.

    Args:
        limit: of characters; a value is counted no further.
        name: of the filter or the method of a text; `join` is the filter.
        value: that it is called on.

    Raises:
        ModelError: no template needs the operation, or its arguments.
    """
    rest = [*args, *named.values()]
    check_operation(name, rest)
    if name in PARAMETERS:
        rest = [*args, *(named[own] for own in PARAMETERS[name][len(args) :] if own in named)]
    size, other = size_of(value, limit), sum(size_of(each, limit) for each in rest)
    if name == "replace" and len(rest) > 1:
        return size + _text(value).count(str(rest[0])) * size_of(rest[1], limit)
    if name == "join" and rest:
        return size + other + size_of(rest[0], limit) * _length(value)
    if name == "format":
        numbers = sum(map(int, NUMBER.findall(_text(value)))) if size <= limit else 0
        fields = len(FIELD.findall(_text(value)))
        wide = WIDTH.search(_text(value))
        return limit + 1 if wide else size + fields * other + numbers
    if name in ("indent", "expandtabs"):
        widths = [a if isinstance(a, int) else size_of(a, limit) for a in rest]
        lines = len(_text(value).splitlines()) + _text(value).count("\t")
        return size + (1 + lines) * sum(widths)
    if name == "tojson":  # what is written is counted, but for one line's indentation
        return size + LARGEST_DEPTH * other
    return size + other


def materialized(value: Any) -> Any:
    """A generator as a list, so that it can be measured before it is used."""
    return list(value) if isinstance(value, GeneratorType) else value


def size_of(value: Any, limit: int) -> int:
    """Characters of a value as text, counted no further than just beyond the limit; beyond it
    where lists in lists are too deep."""
    total, level, depth = 0, [value], 0
    while level and total <= limit:
        inner = list[Any]()
        for top in level:
            total += 1
            if isinstance(top, str):
                total += len(top)
            elif isinstance(top, int):
                total += top.bit_length() // 3
            elif isinstance(top, Mapping):
                inner += [*top.keys(), *top.values()]
            elif isinstance(top, COLLECTIONS):
                inner += top
            if total + len(inner) > limit:
                return limit + 1
        level, depth = inner, depth + 1
        if depth > LARGEST_DEPTH:
            return limit + 1
    return total


def check_operation(name: str, arguments: Sequence[Any]) -> None:
    """Raises: ModelError: a filter or a method is none for a template, or its arguments are."""
    if name in WIDTH_OPERATIONS and any(
        isinstance(a, int) and abs(a) > LARGEST_ARGUMENT for a in arguments
    ):
        why = f"with an argument beyond {LARGEST_ARGUMENT:,}"
    elif name in REVERSE_SEARCHES and any(len(_text(a)) > MAX_SEARCH_CHARS for a in arguments):
        why = f"of more than {MAX_SEARCH_CHARS:,} characters"
    elif name == "sum" and any(isinstance(a, list | tuple) for a in arguments):
        why = "of lists"
    elif name in REFUSED_OPERATIONS:
        why = "which has no bound"
    else:
        return
    raise ModelError(
        f"The chat template of this model asks for {name!r} {why}: give a model with a plain chat "
        "template."
    )


def check_number(operator: str, left: int | float, right: int | float) -> None:
    """Raises: ModelError: an operation makes an integer that is too large, or has one."""
    bits = [abs(int(n)).bit_length() if abs(n) < float("inf") else 0 for n in (left, right)]
    if (bits[0] * abs(right) if operator == "**" else sum(bits)) > LARGEST_BITS:
        raise ModelError(
            f"The chat template of this model computes a number of more than {LARGEST_BITS} bits: "
            "give a model with a plain chat template."
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1
