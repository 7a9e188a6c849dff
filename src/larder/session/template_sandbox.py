"""Sandbox that renders a model's chat template within bounds of output, memory and time.

A chat template is a program that came with the model. It gets what transformers gives it (loop
controls, `generation` blocks, `tojson`, `raise_exception`, `strftime_now`, `namespace`, `dict`) and
renders the same text. In addition every operation that can make a value grow is checked before it
runs, and every loop and macro body checks the time: a template that exceeds a bound raises
ModelError instead of filling memory.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import BuiltinMethodType, CodeType, GeneratorType
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from larder.core.errors import ModelError

BASE_CHARS = 1 << 20  # of output and of every intermediate value, for an empty conversation
CHARS_PER_CHAR = 8  # added for every character of the conversation
SECONDS = 10.0  # processor time of one rendering
LARGEST_ARGUMENT = 10_000  # of a width, an indentation or a count
LARGEST_BITS = 4096  # of an integer
WIDTH = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*\{")  # a field as wide as an attacker likes
FIELD = re.compile(r"[%{]")


def compiled(source: str) -> CodeType:
    """The code of a chat template, for `rendered`; compile once per template.

    Raises:
        jinja2.TemplateError: it does not parse.
    """
    environment = _Sandbox(BASE_CHARS, SECONDS)
    return environment.compile(
        _Checked().visit(environment.parse(source)), filename="chat template"
    )


def rendered(
    code: CodeType, messages: Sequence[Mapping[str, Any]], seconds: float = SECONDS, **named: Any
) -> str:
    """A conversation as text.

    Args:
        code: what `compiled` returned.
        messages: mappings with `role` and `content`.
        seconds: processor time that the rendering may take.
        **named: further variables of the template, such as `bos_token`.

    Raises:
        ModelError: the output, a value on the way or the time exceeds its bound.
        jinja2.TemplateError: the template refuses the conversation.
    """
    chars = BASE_CHARS + CHARS_PER_CHAR * _size(messages, 1 << 62)
    environment = _Sandbox(chars, seconds)
    template = Template.from_code(environment, code, environment.globals)
    written, parts = 0, []
    for part in template.generate(messages=messages, tools=None, documents=None, **named):
        written += len(part)
        environment.check_size(written)
        parts.append(part)
    return "".join(parts)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant writes; only its body is rendered here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """A namespace without names that reach into Python."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *rest = args
        values = dict(*rest, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` without the attributes of a type."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """What `dict.fromkeys` gives."""
        return dict.fromkeys(*args)


class _Checked(NodeTransformer):
    """Puts a check of the time into every body, and makes `~` a call that is checked."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("concatenate")
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno, override=True))
        return node


class _Sandbox(ImmutableSandboxedEnvironment):
    """Environment of one rendering.

    Args:
        chars: size that no value may exceed.
        seconds: processor time from now on.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, chars: int, seconds: float) -> None:
        self._chars, self._seconds = chars, seconds
        self._end = time.thread_time() + seconds
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._finalized,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, f) for name, f in self.filters.items()}
        own = {"range": self._range, "namespace": _Namespace, "dict": _Dict()}
        self.globals.update(own, raise_exception=_refuse, strftime_now=_now)
        del self.globals["lipsum"]

    def tick(self) -> str:
        """Check the time."""
        if time.thread_time() > self._end:
            raise ModelError(
                f"The chat template of this model takes more than {self._seconds:g} s for one "
                "conversation: give a model with a plain chat template."
            )
        return ""

    def concatenate(self, *parts: Any) -> str:
        """What `~` gives."""
        self.check_size(sum(map(self._sized, parts)))
        return "".join(map(str, parts))

    def check_size(self, size: int) -> None:
        """Raises: ModelError: a value of so many characters is beyond the bound."""
        if size > self._chars:
            raise ModelError(
                f"The chat template of this model makes a text of more than {self._chars:,} "
                "characters out of this conversation: give a model with a plain chat template."
            )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if numbers and operator in ("*", "**"):
            _check_number(operator, left, right)
        elif operator == "*":
            count, other = (left, right) if isinstance(left, int) else (right, left)
            self.check_size(self._sized(other) * int(count))
        elif operator == "%" and isinstance(left, str):
            self.check_size(self._grown("format", left, right))
        elif operator == "+":
            self.check_size(self._sized(left) + self._sized(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:  # noqa: B902, N805
        __self.tick()
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            args = tuple(map(_listed, args))
            __self.check_size(__self._grown(__obj.__name__, __obj.__self__, *args, **named))
        return super().call(__context, __obj, *args, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **named: Any) -> str:
            self.check_size(self._grown("format", value.__self__, *args, **named))
            return wrapped(*args, **named)

        return checked

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose result is estimated before it runs."""

        @functools.wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            self.tick()
            args = tuple(map(_listed, args))
            values = [
                a for a in args if not isinstance(a, Environment | Context | nodes.EvalContext)
            ]
            self.check_size(self._grown(name, *values, **named))
            return function(*args, **named)

        return checked

    def _range(self, *args: int) -> range:
        """What loops may count through: no more than the bound of a text."""
        made = range(*args)
        self.check_size(len(made))
        return made

    def _finalized(self, value: Any) -> Any:
        self.check_size(self._sized(value))
        return value

    def _sized(self, value: Any) -> int:
        return _size(value, self._chars)

    def _grown(self, name: str, value: Any = "", *args: Any, **named: Any) -> int:
        """Characters that an operation of this name makes at most."""
        rest = [*args, *named.values()]
        if name == "translate" or any(_is_wide(argument) for argument in rest):
            raise ModelError(
                f"The chat template of this model asks for {name!r} with an argument beyond "
                f"{LARGEST_ARGUMENT:,}: give a model with a plain chat template."
            )
        size, other = self._sized(value), sum(map(self._sized, rest))
        if name == "replace" and len(rest) > 1 and isinstance(value, str):
            return size + value.count(str(rest[0])) * self._sized(rest[1])
        if name == "join":
            many = value if isinstance(value, list | tuple) else rest[0] if rest else ()
            glue = value if isinstance(value, str) else "".join(map(str, rest[:1]))
            return size + other + len(glue) * len(many)
        if name == "format":
            fields = len(FIELD.findall(str(value)))
            return self._chars + 1 if WIDTH.search(str(value)) else size + fields * other
        if name in ("indent", "expandtabs", "wordwrap", "tojson", "pprint"):
            widths = [a if isinstance(a, int) else self._sized(a) for a in rest]
            lines = str(value).count("\n") + str(value).count("\t") if size <= self._chars else 0
            return size + (1 + lines) * sum(widths)
        return size + other


def _listed(value: Any) -> Any:
    """A generator as a list, so that it can be measured before it is used."""
    return list(value) if isinstance(value, GeneratorType) else value


def _size(value: Any, limit: int) -> int:
    """Characters of a value as text, counted no further than just beyond the limit."""
    total, rest = 0, [value]
    while rest and total <= limit:
        top = rest.pop()
        if isinstance(top, str):
            total += len(top)
        elif isinstance(top, Mapping):
            rest += [*top.keys(), *top.values()]
        elif isinstance(top, list | tuple | set | frozenset):
            rest += top
        total += 1
    return total


def _is_wide(argument: Any) -> bool:
    return isinstance(argument, int) and abs(argument) > LARGEST_ARGUMENT


def _check_number(operator: str, left: int | float, right: int | float) -> None:
    bits = [abs(int(n)).bit_length() if abs(n) < float("inf") else 0 for n in (left, right)]
    if (bits[0] * abs(right) if operator == "**" else sum(bits)) > LARGEST_BITS:
        raise ModelError(
            f"The chat template of this model computes a number of more than {LARGEST_BITS} bits: "
            "give a model with a plain chat template."
        )


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} is no name for a value in a namespace.")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML's escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
