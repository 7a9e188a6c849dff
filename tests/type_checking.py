"""Runtime checks of types at the borders of modules while tests run.

As `jaxtyping.install_import_hook` with beartype, at a fraction of its time: that one compiles two
checks of every function at import and checks the arguments of a call twice, with a scope for
dimension names around functions that name none. Here a function gets its check at its first call,
a tensor that fits is recognised without jaxtyping, which has the word on all others, and in one
test the first calls of a function are checked (`CHECKED_CALLS`): a loop repeats the same types.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from inspect import isasyncgenfunction, isgeneratorfunction
from pathlib import Path
from random import Random
from types import CodeType, FunctionType, ModuleType
from typing import Any, get_args, get_type_hints

import torch
from beartype import beartype
from beartype._check.code import codemain
from jaxtyping import AbstractArray, jaxtyped
from jaxtyping._storage import get_shape_memo, pop_shape_memo, push_shape_memo
from torch import Tensor

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "larder"
# Kernels are compiled by numba, which cannot compile a function wrapped in a type check.
UNCHECKED = "larder.ops.cpu"
MARK = "__checked__"  # what the decorator is called in the modules
ARRAYS: Any = type(AbstractArray)  # what decides whether a tensor is of an annotated kind
ASKED = ARRAYS.__instancecheck__  # as jaxtyping does
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}

# beartype checks a random item of each list. It gets numbers of its own, because threads of the
# server call checked functions while strategies of Hypothesis draw, which may not use `random`.
codemain.getrandbits = Random(0).getrandbits  # pyright: ignore[reportPrivateImportUsage]

CHECKED_CALLS = 2
CHECKED = "__beartype_func"  # the default by which the checks of beartype hold their function


@dataclass(frozen=True)
class Compiled:
    """The checks of a function; with its code, which keeps the code's id from being reused."""

    code: CodeType
    check: FunctionType
    is_scoped: bool


COMPILED: dict[int, Compiled] = {}  # by the id of the code


@dataclass
class CheckedCalls:
    """Number of a test, calls of a function that were checked in it, and the test of the last."""

    test: int = 0
    calls: int = 0
    done: int = -1


CALLS: dict[CodeType, CheckedCalls] = {}
RUNNING = CheckedCalls(calls=CHECKED_CALLS)  # the test that runs, and how many calls it checks


def begin_test() -> None:
    """Check the first calls of every function again."""
    RUNNING.test += 1


@contextmanager
def unchecked() -> Iterator[None]:
    """Functions run as they do for users, who have no checks."""
    RUNNING.calls = 0
    try:
        yield
    finally:
        RUNNING.calls = CHECKED_CALLS


def checked_modules(package: Path, unchecked: str) -> list[str]:
    """Every module and folder of the package, cut only as fine as leaving one out demands."""
    name = package.name
    skipped = unchecked.removeprefix(f"{name}.").split(".")
    modules = []
    for depth in range(len(skipped)):
        folder = package.joinpath(*skipped[:depth])
        prefix = ".".join([name, *skipped[:depth]])
        stems = {entry.stem for entry in folder.iterdir() if not entry.stem.startswith(("_", "."))}
        modules += [f"{prefix}.{stem}" for stem in sorted(stems - {skipped[depth]})]
    return modules


def check_imports(modules: Sequence[str]) -> None:
    """From now on these modules, and what lies in them, are imported with their types checked."""
    sys.meta_path.insert(0, Finder(modules))
    ARRAYS.__instancecheck__ = fits


def checked(target: Any) -> Any:
    """A function that refuses wrong types, or a dataclass that refuses to be made of them."""
    if isinstance(target, type):
        if is_dataclass(target) and "__init__" in vars(target):
            target.__init__ = checked(target.__init__)
        return target
    if not isinstance(target, FunctionType) or not target.__annotations__:
        return target
    if "tl.constexpr" in target.__annotations__.values():  # Triton compiles the function itself
        return target
    if isgeneratorfunction(target) or isasyncgenfunction(target):
        return _generator_when_called(target)
    return _when_called(target)


class Finder(MetaPathFinder):
    """Finds as the path does, and has some modules loaded with checks."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = set(modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        words = fullname.split(".")
        if not any(".".join(words[:n]) in self.modules for n in range(1, len(words) + 1)):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    """Loads a module with every function and class in it decorated; nothing is kept on disk."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.decorator_list.append(_mark(node))  # nearest, before others hide the types
            elif isinstance(node, ast.ClassDef):
                node.decorator_list.insert(0, _mark(node))  # last, when dataclass has done its work
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, MARK, checked)
        super().exec_module(module)


def _mark(node: ast.FunctionDef | ast.ClassDef) -> ast.expr:
    return ast.copy_location(ast.Name(MARK, ast.Load()), node)


def _when_called(function: FunctionType) -> Callable[..., Any]:
    """At its first call a function's module is whole, so every name in its types is known.

    Dimension names stand for the same sizes within one call, and within no other.
    """
    strict: Callable[..., Any] | None = None
    is_scoped = False
    count, running = CALLS.setdefault(function.__code__, CheckedCalls()), RUNNING

    def guarded(*args: Any, **named: Any) -> Any:
        nonlocal strict, is_scoped
        if count.done == running.test or not _counts(count):
            return function(*args, **named)
        if strict is None:
            strict, is_scoped = _strict(function)
        if not is_scoped:
            return strict(*args, **named)
        push_shape_memo({})
        try:
            return strict(*args, **named)
        finally:
            pop_shape_memo()

    return _named(guarded, function)


def _generator_when_called(function: FunctionType) -> Callable[..., Any]:
    """`_when_called` for a function whose yielded values are checked too, by jaxtyping."""
    strict: Callable[..., Any] | None = None
    count, running = CALLS.setdefault(function.__code__, CheckedCalls()), RUNNING

    def guarded(*args: Any, **named: Any) -> Any:
        nonlocal strict
        if count.done == running.test or not _counts(count):
            return function(*args, **named)
        if strict is None:
            strict = jaxtyped(function, typechecker=beartype)
        return strict(*args, **named)

    return _named(guarded, function)


def _counts(count: CheckedCalls) -> bool:
    """True if a call is one of the first of its test, which are checked; counts it."""
    if count.test != RUNNING.test:
        count.test, count.calls = RUNNING.test, 0
    if count.calls >= RUNNING.calls:
        if RUNNING.calls:
            count.done = RUNNING.test
        return False
    count.calls += 1
    return True


def _named(guarded: Callable[..., Any], function: FunctionType) -> Callable[..., Any]:
    """Names like those of `functools.wraps`, which is slow for functions made at every call."""
    guarded.__name__, guarded.__qualname__ = function.__name__, function.__qualname__
    guarded.__module__, guarded.__doc__ = function.__module__, function.__doc__
    guarded.__annotations__ = function.__annotations__
    vars(guarded).update(vars(function), __wrapped__=function)
    return guarded


def _strict(function: FunctionType) -> tuple[Callable[..., Any], bool]:
    """The function with checks, and whether they name dimensions.

    What is defined inside a function is another function at every call of that one: its checks,
    which are the same, are compiled once and bound to each.
    """
    known = COMPILED.get(id(function.__code__))
    if known is not None:
        return _bound(known.check, function), known.is_scoped
    check, is_scoped = _compiled(function)
    is_inner = "<locals>" in function.__qualname__
    if is_inner and isinstance(check, FunctionType) and CHECKED in (check.__kwdefaults__ or {}):
        if all(isinstance(hint, str) for hint in function.__annotations__.values()):
            COMPILED[id(function.__code__)] = Compiled(function.__code__, check, is_scoped)
    return check, is_scoped


def _bound(check: FunctionType, function: FunctionType) -> FunctionType:
    """The checks of one function around another of the same code."""
    bound = FunctionType(check.__code__, check.__globals__, check.__name__, check.__defaults__)
    bound.__kwdefaults__ = {**(check.__kwdefaults__ or {}), CHECKED: function}
    return bound


def _compiled(function: FunctionType) -> tuple[Callable[..., Any], bool]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:  # imported for type checkers alone: jaxtyping lets any value pass there
        return jaxtyped(function, typechecker=beartype), False
    resolved = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    resolved.__kwdefaults__ = function.__kwdefaults__
    resolved.__qualname__ = function.__qualname__
    resolved.__module__ = function.__module__
    resolved.__annotations__ = hints
    return beartype(resolved), any(map(_names_dimensions, hints.values()))


def _names_dimensions(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    for given in get_args(hint):
        parts = given if isinstance(given, list) else [given]  # a Callable's are a list
        if any(map(_names_dimensions, parts)):
            return True
    return False


def fits(kind: Any, given: Any) -> bool:
    """True if a value is of an annotated kind, with the names of its dimensions bound if it is.

    A tensor of the right type and of sizes that agree is; what is not that plain is for jaxtyping
    to say.
    """
    dtypes, names = _plain(kind)
    if type(given) is not Tensor or given.dtype not in dtypes or given.ndim != len(names):
        return ASKED(kind, given)
    sizes = get_shape_memo()[0]
    known = len(sizes)
    for name, size in zip(names, given.shape, strict=True):
        if name is not None and sizes.setdefault(name, size) != size:
            while len(sizes) > known:
                sizes.popitem()
            return ASKED(kind, given)
    return True


@cache
def _plain(kind: Any) -> tuple[frozenset[torch.dtype], tuple[str | None, ...]]:
    """The types of number of a kind and the names of its dimensions; no type where it has more."""
    if kind is AbstractArray or kind.array_type is not Tensor or kind._skip_instancecheck:
        return frozenset(), ()
    words = kind.dim_str.split()
    if not isinstance(kind.dtypes, list | tuple) or not all(word.isidentifier() for word in words):
        return frozenset(), ()
    dtypes = frozenset(DTYPES[name] for name in kind.dtypes if name in DTYPES)
    return dtypes, tuple(None if word == "_" else word for word in words)
