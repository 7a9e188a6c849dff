"""Type and range checks for the arguments of public functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from larder.core.errors import BadParameter, UnknownName, UsageError
from larder.core.spelling import COMPRESSION_RATIO, INSTEAD_OF_RATIO

P = ParamSpec("P")
R = TypeVar("R")

# Keywords of other libraries, and what to give instead.
BY_TRANSFORMERS = "load the model with transformers, and give it to Engine(model, tokenizer)"
OTHER_KEYWORDS: Mapping[str, str] = MappingProxyType(
    {
        COMPRESSION_RATIO: INSTEAD_OF_RATIO,
        "press": "give kvpress=press to larder.applied or LarderCache",
        "kvpress": "a press runs in larder.applied(model, kvpress=press), and "
        "docs/from_kvpress.md has the policy in place of each",
        "torch_dtype": "give dtype=",
        "temperature": "in Engine.ask, sampling=SamplingParams(temperature=0.7) sets it "
        "(larder.engine.sampler)",
        "quantization_config": BY_TRANSFORMERS,
        "load_in_4bit": BY_TRANSFORMERS,
        "load_in_8bit": BY_TRANSFORMERS,
        "attn_implementation": BY_TRANSFORMERS,
        "trust_remote_code": BY_TRANSFORMERS,
    }
)


def checked_call(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a public function: a call with other arguments than it takes is an error of
    Larder that names those it takes.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _call_error(function, signature, kwargs, str(error)) from None
        return function(*args, **kwargs)

    return checked


def _call_error(
    function: Callable[..., object],
    signature: inspect.Signature,
    named: Mapping[str, object],
    reason: str,
) -> UsageError:
    """Error for a call whose arguments do not fit a signature."""
    name = f"{function.__qualname__.removesuffix('.__init__')}()"
    taken = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    known = [p.name for p in taken]
    for given in named:
        if given in known:
            continue
        if given in OTHER_KEYWORDS:
            return UnknownName(f"{name} has no argument {given!r}: {OTHER_KEYWORDS[given]}.")
        near = get_close_matches(given, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return UnknownName(f"{name} has no argument {given!r}.{hint} It takes: {', '.join(known)}.")
    ordered = [p.name for p in taken if p.kind is not p.KEYWORD_ONLY]
    others = [f"{p.name}=" for p in taken if p.kind is p.KEYWORD_ONLY]
    by_name = f" and all others by name: {', '.join(others)}" if others else ""
    return UsageError(f"{name}: {reason}. It takes {', '.join(ordered)} by position{by_name}.")


def require(is_met: bool, name: str, rule: str, value: object) -> None:
    """Check a parameter against a rule.

    Args:
        is_met: whether the value keeps the rule.
        name: of the parameter, such as `snapkv.window`.
        rule: what the value must be, such as `at least 1 token`.

    Raises:
        BadParameter: it does not.
    """
    if not is_met:
        raise BadParameter(f"{name} must be {rule}, got {value}.")


def require_at_least(least: int | float, part: str, /, **values: int | float) -> None:
    """Check several parameters of a part against the same lower bound.

    Raises:
        BadParameter: one is below it.
    """
    for name, value in values.items():
        require(value >= least, f"{part}.{name}", f"at least {least}", value)


def check_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Check the type of an argument.

    Args:
        name: name of the argument, for the error.
        kinds: allowed types.
        expected: the allowed types in words, with an example.

    Raises:
        BadParameter: `value` has another type.
    """
    if not isinstance(value, kinds):
        raise BadParameter(f"{name} must be {expected}, got {_describe(value)}.")


def check_count(name: str, value: object) -> None:
    """Check that an argument is a whole number of at least 1.

    Raises:
        BadParameter: `value` is not a whole number, or is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadParameter(f"{name} must be a whole number of at least 1, got {_describe(value)}.")
    require(value >= 1, name, "at least 1", value)


def check_number(name: str, value: object) -> None:
    """Check that an argument is a number, whole or not.

    Raises:
        BadParameter: `value` is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadParameter(f"{name} must be a number, got {_describe(value)}.")


def check_integer(name: str, value: object) -> None:
    """Check that an argument is a whole number, of any sign.

    Raises:
        BadParameter: `value` is not a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadParameter(f"{name} must be a whole number, got {_describe(value)}.")


def _describe(value: object) -> str:
    """Type name of a value, with its repr where that is short."""
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) <= 40 else f"a {kind}"
