"""Type and range checks for the arguments of public functions."""

from __future__ import annotations

from larder.core.errors import BadParameter


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


def check_count(name: str, value: object, least: int = 1) -> None:
    """Check that an argument is a whole number of at least `least`.

    Raises:
        BadParameter: `value` is not a whole number, or is below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadParameter(
            f"{name} must be a whole number of at least {least}, got {_describe(value)}."
        )
    if value < least:
        raise BadParameter(f"{name} must be at least {least}, got {value}.")


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
