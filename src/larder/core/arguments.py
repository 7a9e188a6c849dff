"""Checks of what programs hand to public functions: a wrong type is an error that names it."""

from __future__ import annotations

from larder.core.errors import BadParameter


def check_type(name: str, given: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Check the type of an argument.

    Args:
        name: of the argument.
        kinds: what it may be.
        wanted: the same in words, and how it is written.

    Raises:
        BadParameter: it is of another type.
    """
    if not isinstance(given, kinds):
        raise BadParameter(f"{name} must be {wanted}, got {_described(given)}.")


def check_count(name: str, given: object, least: int = 1) -> None:
    """Check that an argument is a whole number.

    Raises:
        BadParameter: it is none, or below `least`.
    """
    if isinstance(given, bool) or not isinstance(given, int):
        raise BadParameter(
            f"{name} must be a whole number of at least {least}, got {_described(given)}."
        )
    if given < least:
        raise BadParameter(f"{name} must be at least {least}, got {given}.")


def _described(given: object) -> str:
    """A value by its type, shown where it is short."""
    text = repr(given)
    kind = type(given).__name__
    return f"{text} ({kind})" if len(text) <= 40 else f"a {kind}"
