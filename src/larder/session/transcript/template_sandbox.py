"""Sandbox that renders a model's chat template within bounds of output, memory and time.

A chat template is a program supplied with the model. It gets what transformers gives it (loop
controls, `generation` blocks, `tojson`, `raise_exception`, `strftime_now`, `namespace`, `dict`) and
renders the same text. In addition every operation that can make a value grow is checked before it
runs, lazy values are counted as they are produced, and every loop and macro body checks the time: a
template that exceeds a bound, or uses an operation without one, raises ModelError instead of
exhausting memory.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    Sized,
    ValuesView,
)
from datetime import datetime
from types import BuiltinMethodType, CodeType, GeneratorType
from typing import Any

from jinja2 import Environment, Template, TemplateError, meta, nodes
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
MAX_OUTPUT_FACTOR = 16  # of all output, which macros may hand to other macros
MAX_SECONDS = 3.0  # processor time of one rendering
LARGEST_ARGUMENT = 10_000  # of a width, an indentation or a count
LARGEST_BITS = 4096  # of an integer
LARGEST_DEPTH = 100  # of lists in lists: hashes and comparisons recurse
MAX_SEARCH_CHARS = 1000  # of a text searched from the end, which takes a product of lengths
WIDTH = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*\{")  # a field as wide as an attacker likes
# Filters and methods that no chat template needs, whose results or times have no simple bound.
REFUSED_OPERATIONS = frozenset(
    {"encode", "from_bytes", "pprint", "striptags", "to_bytes", "translate", "urlize", "wordwrap"}
    | {"xmlattr"}
)
WIDTH_OPERATIONS = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice"}
)
REVERSE_SEARCHES = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
PARAMETERS = {"replace": ("old", "new"), "join": ("d",)}
COLLECTIONS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def compile_template(source: str) -> CodeType:
    """Compile a chat template for `render_template`, once per template.

    Raises:
        jinja2.TemplateError: the template does not parse.
    """
    environment = _Sandbox(BASE_CHARS, MAX_SECONDS)
    return environment.compile(
        _CheckInserter().visit(environment.parse(source)), filename="chat template"
    )


def template_variables(source: str) -> frozenset[str]:
    """Variables that a chat template reads and does not set, without the functions of the sandbox.

    Raises:
        jinja2.TemplateError: the template does not parse.
    """
    environment = _Sandbox(BASE_CHARS, MAX_SECONDS)
    names = meta.find_undeclared_variables(environment.parse(source))
    return frozenset(names - environment.globals.keys())


def render_template(
    code: CodeType,
    messages: Sequence[Mapping[str, Any]],
    seconds: float = MAX_SECONDS,
    **named: Any,
) -> str:
    """Render a conversation as text.

    Args:
        code: result of `compile_template`.
        messages: mappings with `role` and `content`.
        seconds: processor time that the rendering may take.
        **named: further variables of the template, such as `bos_token` or `tools`.

    Raises:
        ModelError: the output, an intermediate value or the time exceeds its bound.
        jinja2.TemplateError: the template rejects the conversation.
    """
    tools = named.pop("tools", None)
    chars = BASE_CHARS + CHARS_PER_CHAR * (size_of(messages, 1 << 62) + size_of(tools, 1 << 62))
    environment = _Sandbox(chars, seconds)
    template = Template.from_code(environment, code, environment.globals)
    written, parts = 0, []
    for part in template.generate(messages=messages, tools=tools, documents=None, **named):
        written += len(part)
        environment.check_size(written)
        parts.append(part)
    return "".join(parts)


class _Generation(Extension):
    """`{% generation %}`, which marks text of the assistant; only its body is rendered here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """Namespace without names that reach into Python."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *rest = args
        values = dict(*rest, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """No values: namespaces may hold each other many times."""
        return "<Namespace>"


class _Dict:
    """`dict` without the attributes of a type."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Result of `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _CheckInserter(NodeTransformer):
    """Transformer that adds a time check to every body, and size checks to `~` and collections."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            node.test = nodes.And(nodes.Not(_tick()), node.test, lineno=node.lineno)
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("concatenate")
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._collected(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._collected(node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._collected(node)

    def _collected(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if all(isinstance(each, nodes.Const) for each in node.items):
            return node
        made = nodes.EnvironmentAttribute("collected")
        return nodes.Call(made, [node], [], None, None, lineno=node.lineno)

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick()).set_lineno(node.lineno, override=True))
        return node


def _tick() -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Environment of one rendering.

    Args:
        chars: size that no value may exceed.
        seconds: processor time from now on.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def __init__(self, chars: int, seconds: float) -> None:
        self._chars, self._seconds = chars, seconds
        self._end, self._shown = time.thread_time() + seconds, 0
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._finalized,
        )
        self.filters["tojson"] = self._to_json
        self.filters = {name: self._bounded(name, f) for name, f in self.filters.items()}
        self.concat = self._joined  # of the parts of a block or a macro
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
        """Result of `~`, within the size bound."""
        self.check_size(sum(map(self._sized, parts)))
        return "".join(map(str, parts))

    def collected(self, value: Any) -> Any:
        """Validate the size of a list, tuple or mapping made by the template."""
        self.check_size(self._sized(value))
        return value

    def check_size(self, size: int) -> None:
        """Validate the size of a value in characters.

        Raises:
            ModelError: the size is beyond the bound.
        """
        if size > self._chars:
            raise ModelError(
                f"The chat template of this model makes a text of more than {self._chars:,} "
                "characters out of this conversation: give a model with a plain chat template."
            )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if numbers and operator != "+":
            check_number(operator, left, right)
        elif operator == "*":
            count, other = (left, right) if isinstance(left, int) else (right, left)
            self.check_size(self._sized(other) * int(count))
        elif operator == "%" and isinstance(left, str):
            self.check_size(output_size_bound(self._chars, "format", left, right))
        elif operator == "+":
            self.check_size(self._sized(left) + self._sized(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:  # noqa: B902, N805
        __self.tick()
        if isinstance(__obj, BuiltinMethodType):
            check_operation(__obj.__name__, ())
            if isinstance(__obj.__self__, str):
                args = tuple(map(materialized, args))
                own = (__obj.__self__, *args)
                if __obj.__name__ == "join":  # arguments in the order of the filter
                    own = own[::-1]
                __self.check_size(output_size_bound(__self._chars, __obj.__name__, *own, **named))
        made = super().call(__context, __obj, *args, **named)
        return __self.collected(made) if isinstance(__obj, _Dict) else made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **named: Any) -> str:
            self.check_size(
                output_size_bound(self._chars, "format", value.__self__, *args, **named)
            )
            return wrapped(*args, **named)

        return checked

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Filter with a size bound that is checked before it runs."""
        checked = functools.partial(self._filtered, name, function)
        vars(checked).update(
            getattr(function, "__dict__", {})
        )  # what the filter wants to be given, by Jinja's marks
        return checked

    def _filtered(
        self, name: str, function: Callable[..., Any], /, *args: Any, **named: Any
    ) -> Any:
        """Result of a filter within its bounds."""
        self.tick()
        args = tuple(map(materialized, args))
        values = [a for a in args if not isinstance(a, Environment | Context | nodes.EvalContext)]
        self.check_size(output_size_bound(self._chars, name, *values, **named))
        made = function(*args, **named)
        return self._counted(made) if isinstance(made, GeneratorType) else made

    def _counted(self, parts: Iterable[Any]) -> Iterator[Any]:
        """Yield the parts, as long as their total size is within the bound."""
        total = 0
        for part in parts:
            self.tick()
            total += self._sized(part)
            self.check_size(total)
            yield part

    def _joined(self, parts: Iterable[str]) -> str:
        parts = list(parts)
        self.check_size(sum(map(len, parts)))
        return "".join(parts)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without HTML's escapes."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return "".join(self._counted(encoder.iterencode(value)))

    def _range(self, *args: int) -> range:
        """Range within the size bound."""
        made = range(*args)
        self.check_size(len(made))
        return made

    def _finalized(self, value: Any) -> Any:
        size = self._sized(value)
        self._shown += size  # also into blocks and macros, whose parts are held until they end
        self.check_size(max(size, self._shown // MAX_OUTPUT_FACTOR))
        return value

    def _sized(self, value: Any) -> int:
        return size_of(value, self._chars)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} is no name for a value in a namespace.")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


FIELD, NUMBER = re.compile(r"[%{]"), re.compile(r"\d+")
WIDTH_OPERATIONS |= {"tojson", "zfill"}


def output_size_bound(limit: int, name: str, value: Any = "", /, *args: Any, **named: Any) -> int:
    """Upper bound of the characters of a result; above the limit where there is no bound.

    Args:
        limit: limit in characters; larger values are counted no further.
        name: name of the filter or of the text method; `join` is the filter.
        value: value that the operation is called on.

    Raises:
        ModelError: the operation or its arguments are not permitted.
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
    if name == "tojson":  # the output is counted, except the indentation of one line
        return size + LARGEST_DEPTH * other
    return size + other


def materialized(value: Any) -> Any:
    """A generator as a list, so that it can be measured before it is used."""
    return list(value) if isinstance(value, GeneratorType) else value


def size_of(value: Any, limit: int) -> int:
    """Characters of a value as text, counted up to just above the limit.

    Above the limit also for collections nested too deeply.
    """
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
    """Validate a filter or method and its arguments.

    Raises:
        ModelError: the operation or its arguments are not permitted.
    """
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
    """Validate the integers of an operation.

    Raises:
        ModelError: an operand or the result has too many bits.
    """
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
